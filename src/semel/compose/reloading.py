"""Files that a running process reads again when they change: API keys, certificates, transport keys (threats S25).

What a file holds is compared, not its time: a file that was replaced, written in place or mounted anew is noticed all
the same. A file that cannot be used changes nothing: what it held before stays in use, log and metrics say so, and it
is tried again until it can be.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from blake3 import blake3

from semel.core import Keyring
from semel.errors import ConfigError
from semel.key_files import TransportSource
from semel.settings.frontend import ServingSettings
from semel.settings.secrets import read_api_keys
from semel.telemetry import metrics
from semel.telemetry.meter import Meter, Sample
from semel.wire.keys import TransportKeys

if TYPE_CHECKING:
    from semel.web.server import HttpServer

__all__ = ["ReloadedFiles", "follow_keys", "reloaded_files"]

_EVERY_S: Final = 0.5
_MAX_BYTES: Final = 64 << 20

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class ReloadedFiles(Generic[_T]):
    """Files that are read again when they change, and the user of their contents."""

    def __init__(
        self, name: str, paths: Sequence[Path], load: Callable[[], _T], use: Callable[[_T], None], meter: Meter
    ) -> None:
        """`load` reads the files, in a thread; `use` gets what it returns, on the event loop.

        Both may raise a `ConfigError` or `ValueError`.
        """
        self._name = name
        self._paths = tuple(paths)
        self._load = load
        self._use = use
        self._meter = meter
        self._used: bytes | None = None
        """The fingerprint in use; None until they were read here: they may have changed since the process began."""

        self._failure = ""
        """The reason that what is there now cannot be used."""

        meter.watch(self.samples)
        for outcome in ("ok", "failed"):  # a rate needs a zero to begin with
            meter.count(metrics.FILE_RELOADS, name, outcome, amount=0)

    async def run(self) -> None:
        """Look after them until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(_EVERY_S)

    async def refresh(self) -> None:
        """Read them again if they have changed, or could not be used the last time."""
        try:
            await self._refresh()
        except (ConfigError, ValueError) as error:
            if self._is_new(str(error)):
                self._meter.count(metrics.FILE_RELOADS, self._name, "failed")
                logger.warning(
                    "%s: changed, and cannot be used; what was there before stays in use: %s", self._name, error
                )
        except Exception as error:  # whatever it was, a later change must be noticed: a key may have to be revoked
            if self._is_new(repr(error)):
                logger.exception("%s: could not be looked at, in a way that we do not expect", self._name)

    async def _refresh(self) -> None:
        current = await asyncio.to_thread(_fingerprint, self._paths)
        if current == self._used and not self._failure:
            return
        self._use(await asyncio.to_thread(self._load))
        is_first, self._used, self._failure = self._used is None, current, ""
        if not is_first:
            self._meter.count(metrics.FILE_RELOADS, self._name, "ok")
            logger.info("%s: read again from %s", self._name, ", ".join(map(str, self._paths)))

    def _is_new(self, failure: str) -> bool:
        """Note a failure; returns whether it is another one than the last time."""
        before, self._failure = self._failure, failure or "for no reason"
        return before != self._failure

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics."""
        yield metrics.FILE_STALE, bool(self._failure), (self._name,)


def reloaded_files(
    serving: ServingSettings, keys: Keyring, server: HttpServer, meter: Meter
) -> Iterator[ReloadedFiles[Any]]:
    """Yield the files of a frontend that are read again when they change: API keys, and certificates."""
    if (path := serving.keys.api_keys_file) is not None:
        yield ReloadedFiles("api_keys", [path], lambda: read_api_keys(serving.keys), keys.replace, meter)
    if serving.tls.is_on:

        def use(context: ssl.SSLContext | None) -> None:
            assert context is not None
            server.use_tls(context)

        yield ReloadedFiles("certificate", serving.tls.files, serving.tls.context, use, meter)


async def follow_keys(source: TransportSource, use: Callable[[TransportKeys], None], meter: Meter) -> None:
    """Have keys used whenever their file has others; returns at once if they never change."""
    if source.file is None:
        return

    def take(keys: TransportKeys) -> None:
        if keys != source.keys:
            use(keys)
            source.keys = keys
            numbers = ", ".join(str(one.number) for one in keys.generations)
            logger.info("transport keys of generation %s are accepted", numbers)

    await ReloadedFiles("transport_keys", [source.file], source.load, take, meter).run()


def _fingerprint(paths: Sequence[Path]) -> bytes:
    """Hash what the files hold, whose they are and who may read them. A file that cannot be read has a hash too."""
    state = blake3()
    for path in paths:
        try:
            with path.open("rb") as file:
                content, status = file.read(_MAX_BYTES), os.fstat(file.fileno())
            state.update(b"\1%d %d %d %d " % (status.st_mode, status.st_uid, status.st_gid, len(content)))
            state.update(content)
        except OSError:
            state.update(b"\0")
    return state.digest()
