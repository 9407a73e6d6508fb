"""Choice of the encoder outputs that go into the fleet's store. Pure: the clock is passed in.

An output is published when its item was shown often enough and it is in this host's cache. So what is shown once never
leaves the host. One output is published once at a time, and on average not more than some bytes per second. What could
not be published is tried again when it is shown again. What was published is believed to be in the store for a while,
for the store may lose it without a word. What is known about items is bounded: the ones that were shown or saved least
recently are forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

from semel.core import Digest, LruMap

__all__ = ["Publishing"]

_MAX_ITEMS: Final = 65_536
_BYTES_PER_S: Final = 256 << 20


@dataclass(slots=True)
class _Entry:
    shows: int = 0
    nbytes: int | None = None
    """Its size in the host cache; None if it is not there."""
    published_until: float = -inf
    """Until when it is taken to be in the store."""


class Publishing:
    """One thread at a time may call it."""

    def __init__(
        self,
        publish_after: int,
        *,
        believed_s: float = inf,
        bytes_per_s: float = _BYTES_PER_S,
        max_items: int = _MAX_ITEMS,
    ) -> None:
        """`believed_s` is how long what was published is taken to be in the store."""
        self._publish_after = publish_after
        self._believed_s = believed_s
        self._bytes_per_s = bytes_per_s
        self._entries: LruMap[Digest, _Entry] = LruMap(max_items)
        self._ready: dict[Digest, None] = {}
        """Outputs that can be published, in the order in which they came to that."""
        self._in_progress: dict[Digest, _Entry] = {}
        self._free_at = 0.0
        self._is_draining = False

    @property
    def has_ready(self) -> bool:
        """True if something waits for being published."""
        return bool(self._ready)

    def show(self, digest: Digest, now: float) -> None:
        """Count a request with an item."""
        entry = self._touch(digest)
        entry.shows += 1
        self._admit(digest, entry, now)

    def saved(self, digest: Digest, nbytes: int, now: float) -> None:
        """Take note that an encoder output is in the host cache."""
        entry = self._touch(digest)
        entry.nbytes = nbytes
        self._admit(digest, entry, now)

    def lost(self, digest: Digest, now: float) -> None:
        """Take note that the store does not have an output, whatever was published."""
        if (entry := self._entries.peek(digest)) is not None:
            entry.published_until = -inf
            self._admit(digest, entry, now)

    def gone(self, digest: Digest) -> None:
        """Take note that an output is not in the host cache any more."""
        if (entry := self._entries.peek(digest)) is not None:
            entry.nbytes = None
            self._ready.pop(digest, None)

    def take(self, now: float) -> Digest | None:
        """Return the output to publish now, if there is one. `done` must follow."""
        if now < self._free_at and not self._is_draining:
            return None
        digest = next(iter(self._ready), None)
        if digest is None or (entry := self._entries.peek(digest)) is None:
            return None
        del self._ready[digest]
        self._in_progress[digest] = entry
        self._free_at = max(now, self._free_at) + (entry.nbytes or 0) / self._bytes_per_s
        return digest

    def done(self, digest: Digest, published: bool, now: float) -> None:
        """Say whether what was taken is in the store now."""
        if (entry := self._in_progress.pop(digest, None)) is None:
            return
        if published:
            entry.published_until = now + self._believed_s
        current = self._entries.peek(digest)
        if current is not None and current is not entry:  # forgotten and saved again meanwhile
            self._admit(digest, current, now)

    def drain(self, now: float) -> None:
        """Publish the whole host cache from now on, most shown first, at any speed: the worker ends."""
        self._is_draining = True
        ranked = sorted(self._entries.items(), key=lambda one: one[1].shows, reverse=True)
        self._ready.clear()
        for digest, entry in ranked:
            self._admit(digest, entry, now)

    def forget_all(self) -> None:
        """Forget everything that was shown or saved: the encoder has other weights."""
        self._entries.clear()
        self._ready.clear()

    def _touch(self, digest: Digest) -> _Entry:
        entry = self._entries.get(digest)
        if entry is None:
            entry = _Entry()
            for forgotten in self._entries.put(digest, entry):
                self._ready.pop(forgotten, None)
        return entry

    def _admit(self, digest: Digest, entry: _Entry, now: float) -> None:
        is_wanted = self._is_draining or entry.shows >= self._publish_after
        is_published = now < entry.published_until
        if is_wanted and entry.nbytes is not None and not is_published and digest not in self._in_progress:
            self._ready.setdefault(digest)
