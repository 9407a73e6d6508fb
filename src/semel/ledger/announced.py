"""The items that one worker has announced and not withdrawn: digests, sizes and layouts, never a tensor (D2).

It uses little memory: most items of a model share a few feature infos, which come here as one object each
(`semel.wire.layout_runs`). The number of digests and the bytes of their layouts are bounded. Over a bound, the oldest
announcements are forgotten, which costs a payload, never an answer.

Digests are kept as plain bytes, to which they are equal: instances of a class of ours are walked by the garbage
collector, and with six million of them each of its longer walks stopped the event loop for a quarter of a second.
"""

from __future__ import annotations

from collections.abc import Mapping

from semel.core import Digest, FeatureInfo
from semel.ledger.directory import Holders

__all__ = ["Announced"]


class Announced:
    """The feature infos of one worker, by digest."""

    def __init__(self, max_digests: int, max_layout_bytes: int, holders: Holders, bit: int) -> None:
        self.max_digests = max_digests
        self.max_layout_bytes = max_layout_bytes
        """Maximum size of the layouts of all digests, as if no two shared one."""
        self._infos: dict[bytes, FeatureInfo] = {}
        self._layout_bytes = 0
        self._holders = holders
        self._bit = bit

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._infos

    def __len__(self) -> int:
        return len(self._infos)

    def get(self, digest: Digest) -> FeatureInfo | None:
        """Return the announced feature info of a digest."""
        return self._infos.get(digest)

    def update(self, infos: Mapping[Digest, FeatureInfo]) -> None:
        """Record an announcement, and forget what exceeds the bounds."""
        for digest in infos.keys() & self._infos.keys():
            self.drop(digest)
        plain = dict(zip(map(bytes, infos), infos.values(), strict=True))
        self._infos.update(plain)
        self._holders.update(plain, self._bit)
        self._layout_bytes += sum([info.layout.nbytes for info in infos.values()])
        while len(self._infos) > self.max_digests or self._layout_bytes > self.max_layout_bytes:
            self.drop(next(iter(self._infos)))

    def drop(self, digest: bytes) -> None:
        """Forget a digest, whether or not it is known."""
        if (info := self._infos.pop(digest, None)) is not None:
            self._layout_bytes -= info.layout.nbytes
            self._holders.discard(digest, self._bit)

    def move(self, holders: Holders, bit: int) -> None:
        """Report to another directory from now on."""
        for digest in self._infos:
            self._holders.discard(digest, self._bit)
            holders.add(digest, bit)
        self._holders, self._bit = holders, bit

    def clear(self) -> None:
        """Forget everything."""
        for digest in self._infos:
            self._holders.discard(digest, self._bit)
        self._infos.clear()
        self._layout_bytes = 0
