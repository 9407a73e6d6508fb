"""Workers by the EndpointSlices of a service: a list, then a watch for what changes, for as long as it goes.

The rule: nothing but what the API server says of a slice takes a worker away. A watch that breaks, a list that comes
half, an answer that makes no sense, a token that has expired: what was known is kept, and it is tried again, later each
time.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Final, Protocol, TypeVar

import msgspec

from semel.fleet.endpoint_slices import EndpointSlice, ServicePort, workers_in

__all__ = ["ApiError", "ApiStatus", "Expired", "SliceApi", "SliceSource"]

_MAX_PAGES: Final = 64
_FIRST_PAUSE_S: Final = 0.25
_MAX_PAUSE_S: Final = 30.0
_GONE: Final = 410
_EVENTS: Final = ("ADDED", "MODIFIED", "DELETED", "BOOKMARK")

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class ApiError(OSError):
    """The API server cannot be asked, or does not answer as it should."""


class Expired(ApiError):
    """The version from which to go on is too old for the API server: only a new list helps."""


class SliceApi(Protocol):
    """An API server, as far as slices are concerned. Raises `ApiError`; `Expired` where it answers 410."""

    async def page(self, service: ServicePort, position: str) -> bytes:
        """Return a part of the list, from the position that the part before it ends with."""

    def changes(self, service: ServicePort, version: str) -> AsyncIterator[bytes]:
        """Yield what has changed since a version, event by event, until the server ends the answer."""


class _ListMetadata(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str
    continue_: str = msgspec.field(default="", name="continue")


class _Page(msgspec.Struct, frozen=True):
    metadata: _ListMetadata
    items: tuple[EndpointSlice, ...]


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class ApiStatus(msgspec.Struct, frozen=True):
    """An error, as the API server describes it."""

    code: int = 0
    message: str = ""


_read_page: Final = msgspec.json.Decoder(_Page).decode
_read_event: Final = msgspec.json.Decoder(_Event).decode
_read_slice: Final = msgspec.json.Decoder(EndpointSlice).decode
_read_status: Final = msgspec.json.Decoder(ApiStatus).decode


class SliceSource:
    """The workers of a service of Kubernetes. `watch` keeps them up to date, `read` returns those that are known."""

    every_s = 1

    def __init__(
        self,
        service: ServicePort,
        api: SliceApi,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = lambda: random.uniform(0.5, 1.5),
    ) -> None:
        self._service = service
        self._api = api
        self._sleep = sleep
        self._jitter = jitter
        self._slices: dict[str, EndpointSlice] = {}
        self._version: str | None = None  # from which to watch on; without one a list is needed
        self._has_tried = False
        self._workers: tuple[str, ...] = ()
        self._fault = ""
        self._failures = 0  # attempts since an event came, or since the server ended a watch as it should

    async def read(self) -> Sequence[str]:
        """Return the known workers; the first call asks for the list. A server that fails may answer later."""
        if not self._has_tried:
            self._has_tried = True
            try:
                await self._list()
            except ApiError as error:
                self._complain(error)
        return self._workers

    async def watch(self) -> None:
        """Follow what changes, until cancelled."""
        while True:
            try:
                if self._version is None:
                    await self._list()
                await self._follow(self._version or "")
            except Expired:
                self._version = None
                self._failures += 1
            except ApiError as error:
                self._complain(error)
                self._failures += 1
            await self._sleep(min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(self._failures, 16)) * self._jitter())

    async def _list(self) -> None:
        """Read all pages. What was known goes only when the last of them is there."""
        slices: list[EndpointSlice] = []
        position = ""
        for _ in range(_MAX_PAGES):
            page = await asyncio.to_thread(_decoded, _read_page, await self._api.page(self._service, position))
            slices += page.items
            if not (position := page.metadata.continue_):
                self._slices = {one.metadata.name: one for one in slices}
                self._version = page.metadata.resource_version
                self._settle()
                return
        raise ApiError(f"the list of slices has more than {_MAX_PAGES} pages")

    async def _follow(self, version: str) -> None:
        async with aclosing(self._api.changes(self._service, version)) as lines:  # type: ignore[type-var]
            async for line in lines:
                try:
                    self._take(line)
                except Expired:
                    raise
                except ApiError:
                    self._version = None  # what the event said is lost, and only a list has it
                    raise
                self._failures = 0
                self._settle()
        self._failures = min(self._failures + 1, 2)  # as it should be, but not at once again if it comes to nothing

    def _take(self, line: bytes) -> None:
        event = _decoded(_read_event, line)
        if event.type == "ERROR":
            status = _decoded(_read_status, event.object)
            raise (Expired if status.code == _GONE else ApiError)(f"{status.code}: {status.message}")
        if event.type not in _EVENTS:
            raise ApiError(f"an event is of the type {event.type[:40]!r}")
        one = _decoded(_read_slice, event.object)
        if event.type == "DELETED":
            self._slices.pop(one.metadata.name, None)
        elif event.type != "BOOKMARK":  # which has a version and nothing else
            self._slices[one.metadata.name] = one
        self._version = one.metadata.resource_version

    def _settle(self) -> None:
        """Name the workers that are known now, and log that the server answers again."""
        self._workers = workers_in(self._slices.values(), self._service)
        if self._fault:
            logger.info("--worker-endpoint-slices %s is read again: %d workers", self._service, len(self._workers))
            self._fault = ""

    def _complain(self, error: ApiError) -> None:
        """Say once what is wrong, not at every attempt."""
        if self._fault != str(error):
            self._fault = str(error)
            logger.error(
                "--worker-endpoint-slices %s cannot be read: %s; the workers that it named before are kept",
                self._service,
                error,
            )


def _decoded(decode: Callable[[bytes], _T], data: bytes | msgspec.Raw) -> _T:
    try:
        return decode(bytes(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(f"the API server's answer makes no sense: {error}") from None
