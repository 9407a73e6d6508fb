"""Media that end the processes which work on them, so that sending them again costs no further process.

Clients send again what failed with 5xx, and an attacker sends again anyway. A crash is a proof; a process
that hung or ended by itself may have been unlucky, so its item gets a second try; one that was killed, as the kernel
does for want of memory, says nothing about its item and is not noted at all. Bounded in number and in time; what is
processed after all is cleared. Known by a hash of tenant, bytes and options: what happened to one tenant's item refuses
nothing to another. Long media are hashed in a thread: a page has its whole document with it. No I/O.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from semel.aio import run_if_large
from semel.core import LruMap, Media, hash_parts
from semel.errors import RequestError

__all__ = ["Quarantine"]

_TRIES: Final = 2

_Name = tuple[int, bytes]  # the bytes of the media, the hash of all that decides what happens to it


@dataclass(frozen=True, slots=True)
class _Record:
    tries_left: int
    until: float
    refusal: RequestError


class Quarantine:
    """The media that ended a process lately, each with the error that its sender gets instead of another try."""

    def __init__(
        self, *, max_items: int = 1_024, keep_s: float = 900.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keep_s = keep_s
        self._clock = clock
        self._records: LruMap[_Name, _Record] = LruMap(max_items)
        self._sizes: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._records)

    async def refusal(self, media: Media, options: Mapping[str, object], tenant: str = "") -> RequestError | None:
        """Return why it is not tried again, if it is not."""
        if not self._may_have(media):
            return None
        record = self._records.peek(name := await _name(media, options, tenant))
        if record is None:
            return None
        if record.until <= self._clock():
            self._drop(name)
            return None
        return None if record.tries_left else type(record.refusal)(str(record.refusal))

    async def quarantine(
        self, media: Media, options: Mapping[str, object], refusal: RequestError, tenant: str = ""
    ) -> None:
        """Note that it crashed a process: it is not tried again for a while."""
        self._note(await _name(media, options, tenant), 0, refusal)

    async def suspect(
        self, media: Media, options: Mapping[str, object], refusal: RequestError, tenant: str = ""
    ) -> None:
        """Note that a process ended over it; not tried again for a while if that happens once more."""
        name = await _name(media, options, tenant)
        record = self._records.peek(name)
        tries_left = _TRIES if record is None or record.until <= self._clock() else record.tries_left
        self._note(name, max(tries_left - 1, 0), refusal)

    async def clear(self, media: Media, options: Mapping[str, object], tenant: str = "") -> None:
        """Note that it has been processed."""
        if self._may_have(media):
            self._drop(await _name(media, options, tenant))

    def _may_have(self, media: Media) -> bool:
        """Return whether a hash is worth its time: nearly always nothing of this size has ended a process."""
        return len(media.data) in self._sizes

    def _note(self, name: _Name, tries_left: int, refusal: RequestError) -> None:
        self._drop(name)
        self._sizes[name[0]] += 1
        for forgotten in self._records.put(name, _Record(tries_left, self._clock() + self._keep_s, refusal)):
            self._uncount(forgotten)

    def _drop(self, name: _Name) -> None:
        if self._records.pop(name) is not None:
            self._uncount(name)

    def _uncount(self, name: _Name) -> None:
        self._sizes[name[0]] -= 1
        if not self._sizes[name[0]]:
            del self._sizes[name[0]]


async def _name(media: Media, options: Mapping[str, object], tenant: str) -> _Name:
    parts = (
        tenant.encode(),
        media.modality.encode(),
        msgspec.msgpack.encode((options, media.page), order="sorted"),
        media.data,
    )
    hashed = await run_if_large(partial(hash_parts, parts), len(media.data))
    return len(media.data), hashed.digest()
