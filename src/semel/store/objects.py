"""Objects on a disk or in a bucket, through obstore: whole objects by name, with a deadline on every call.

obstore works in threads of its own, and nothing stops a thread. An operation that took too long is given up, but what
it holds is counted until it has really ended (threats S18): while too much is held so, nothing more is begun.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from semel.errors import ConfigError, MediaStoreUnavailable

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["BucketObjects", "Objects", "OnEnd", "open_objects"]

_MAX_ABANDONED: Final = 64
_MAX_ABANDONED_BYTES: Final = 256 * 1024 * 1024
_PAGE: Final = 250
_LEFTOVER_S: Final = 3_600.0
_SCHEMES: Final = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss")

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

OnEnd = Callable[[bool], None]


class Objects(Protocol):
    """Objects by name. Every call raises `MediaStoreUnavailable` if the store cannot do it in time."""

    async def put(self, path: str, data: bytes | bytearray, on_end: OnEnd = lambda _: None) -> None:
        """Write an object, at once or not at all.

        `on_end` is called once with whether it is there: when the writing has ended, also if nobody waits for it.
        """
        ...

    async def get(self, path: str, nbytes: int) -> memoryview | None:
        """The bytes of an object of this size, if it is there."""
        ...

    @property
    def errors(self) -> int:
        """Operations that failed or took too long."""
        ...

    async def delete(self, paths: Iterable[str]) -> None:
        """Delete objects. One that is not there is deleted."""
        ...

    def list(self, prefix: str) -> AsyncIterator[Sequence[tuple[str, int]]]:
        """The names and sizes of all objects in a folder and the folders in it, some at a time."""
        ...


class BucketObjects:
    """Objects in a store of obstore's."""

    def __init__(self, store: ObjectStore, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._abandoned: dict[asyncio.Future[Any], int] = {}
        self._errors = 0

    @property
    def errors(self) -> int:
        """Operations that failed or took too long."""
        return self._errors

    def __repr__(self) -> str:
        return f"BucketObjects({self._store!r})"

    async def put(self, path: str, data: bytes | bytearray, on_end: OnEnd = lambda _: None) -> None:
        """Write an object."""
        is_written = False

        async def write() -> None:
            nonlocal is_written
            try:
                # In one piece: what is written in parts and never ended would stay in a bucket, unseen.
                await self._store.put_async(path, data, use_multipart=False)
                is_written = True
            finally:
                on_end(is_written)

        if not self._has_room(len(data)):
            on_end(is_written)
        await self._within(write(), len(data))

    async def get(self, path: str, nbytes: int) -> memoryview | None:
        """Read an object."""

        async def read() -> memoryview:
            return memoryview(await (await self._store.get_async(path)).bytes_async())

        try:
            return await self._within(read(), nbytes)
        except FileNotFoundError:
            return None

    async def delete(self, paths: Iterable[str]) -> None:
        """Delete objects one by one: a store may end a common deletion at the first that is not there."""
        for path in paths:
            try:
                await self._within(self._store.delete_async(path))
            except FileNotFoundError:
                continue

    async def list(self, prefix: str) -> AsyncIterator[Sequence[tuple[str, int]]]:
        """List objects."""
        pages = aiter(self._store.list(prefix, chunk_size=_PAGE))
        while (page := await self._within(_next(pages))) is not None:
            yield [(one["path"], one["size"]) for one in page]

    def _has_room(self, nbytes: int) -> bool:
        """Whether so much may be held by one more operation, beside those that were given up."""
        abandoned_bytes = sum(self._abandoned.values())
        return len(self._abandoned) < _MAX_ABANDONED and abandoned_bytes + nbytes <= _MAX_ABANDONED_BYTES

    async def _within(self, operation: Coroutine[Any, Any, _T], nbytes: int = 0) -> _T:
        if not self._has_room(nbytes):
            operation.close()
            raise MediaStoreUnavailable("the media store does not answer; try again in a moment")
        working = asyncio.ensure_future(operation)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(working)
        except FileNotFoundError:
            raise
        except TimeoutError:
            self._errors += 1
            logger.warning("the media store took longer than %g s (--media-store-timeout-s)", self._timeout_s)
            raise MediaStoreUnavailable("the media store took too long; try again in a moment") from None
        except Exception as error:  # noqa: BLE001 - obstore raises errors of its own, of the system and of Python
            self._errors += 1
            logger.warning("the media store failed: %s", str(error).partition("\n")[0])
            raise MediaStoreUnavailable("the media store failed; its frontend's log says why") from None
        finally:
            if not working.done():
                self._abandoned[working] = nbytes
                working.add_done_callback(self._forget)

    def _forget(self, working: asyncio.Future[Any]) -> None:
        self._abandoned.pop(working, None)
        if not working.cancelled():
            working.exception()  # nobody waits for it


async def _next(pages: AsyncIterator[Sequence[Any]]) -> Sequence[Any] | None:
    return await anext(pages, None)


def _remove_leftovers(folder: Path) -> None:
    """Remove what a killed process was writing: obstore writes to NAME#NUMBER, and renames it when it is complete.

    Others may be writing to the same folder, so only what is an hour old goes.
    """
    since_s = time.time() - _LEFTOVER_S
    for path in folder.rglob("*#*"):
        if path.name.rpartition("#")[2].isdecimal() and path.is_file() and path.stat().st_mtime < since_s:
            path.unlink(missing_ok=True)


def open_objects(location: str, timeout_s: float) -> BucketObjects:
    """The objects in a folder, which is made, or in a bucket. What cannot be one is refused with the flag's name."""
    from obstore.store import LocalStore, from_url

    scheme, colon, _ = location.partition("://")
    if colon and scheme not in _SCHEMES:
        raise ConfigError(f"--media-store {location}: must be a folder, or a URL with s3://, gs:// or az://")
    try:
        if not colon:
            folder = Path(location).absolute()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_leftovers(folder)
            return BucketObjects(LocalStore(folder, automatic_cleanup=True), timeout_s)
        timeout = timedelta(seconds=timeout_s)
        store = from_url(
            location,
            # Plain HTTP only if the operator's endpoint is: a bucket's own address is always https.
            client_options={"timeout": timeout, "connect_timeout": timeout, "allow_http": True},
            retry_config={"max_retries": 2, "retry_timeout": timeout},
        )
    except OSError as error:
        raise ConfigError(f"--media-store {location}: {error.strerror or 'cannot be opened'}") from error
    except Exception as error:
        raise ConfigError(f"--media-store {location}: {str(error).partition(chr(10))[0]}") from error
    return BucketObjects(store, timeout_s)
