"""Files that a running frontend reads again when they change: API keys and certificates (threats S25).

What a file holds is compared, not its time: a file that was replaced, written in place or mounted anew is noticed all
the same. A file that cannot be used changes nothing: what it held before stays in use, and log and metrics say so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

from blake3 import blake3

from semel.errors import ConfigError
from semel.telemetry.meter import Meter, Sample
from semel.telemetry.metrics import FILE_RELOADS, FILE_STALE

__all__ = ["ReloadedFiles"]

_EVERY_S: Final = 0.5
_MAX_BYTES: Final = 64 << 20

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class ReloadedFiles(Generic[_T]):
    """Files, what is made of them, and who uses it."""

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
        self._seen: bytes | None = None
        """None until they were read here: they may have changed since the process began."""

        self._is_stale = False
        meter.watch(self.samples)
        for outcome in ("ok", "failed"):  # a rate needs a zero to begin with
            meter.count(FILE_RELOADS, name, outcome, amount=0)

    async def run(self) -> None:
        """Look after them until cancelled."""
        while True:
            try:
                await self.refresh()
            except Exception:  # whatever it was, a later change must be noticed: a key may have to be revoked
                logger.exception("%s: could not be looked at, in a way that we do not expect", self._name)
            await asyncio.sleep(_EVERY_S)

    async def refresh(self) -> None:
        """Read them again if they have changed."""
        current = await asyncio.to_thread(_fingerprint, self._paths)
        if current == self._seen:
            return
        is_first, self._seen = self._seen is None, current
        try:
            self._use(await asyncio.to_thread(self._load))
        except (ConfigError, ValueError) as error:
            self._is_stale = True
            self._meter.count(FILE_RELOADS, self._name, "failed")
            logger.warning("%s: changed, and cannot be used; what was there before stays in use: %s", self._name, error)
            return
        self._is_stale = False
        if not is_first:
            self._meter.count(FILE_RELOADS, self._name, "ok")
            logger.info("%s: read again from %s", self._name, ", ".join(map(str, self._paths)))

    def samples(self) -> Iterator[Sample]:
        """The metrics."""
        yield FILE_STALE, self._is_stale, (self._name,)


def _fingerprint(paths: Sequence[Path]) -> bytes:
    """What the files hold and who may read them, as one hash. A file that cannot be read has one too."""
    state = blake3()
    for path in paths:
        try:
            with path.open("rb") as file:
                content = file.read(_MAX_BYTES)
                mode = path.stat().st_mode
            state.update(b"\1%d %d " % (mode, len(content)))
            state.update(content)
        except OSError:
            state.update(b"\0")
    return state.digest()
