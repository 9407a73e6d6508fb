"""The items that one worker has announced and not withdrawn: digests, sizes and layouts, never a tensor (D2).

It uses little memory. Most items of a model share a few layouts, so equal layouts are one object here, and so are equal
feature infos. A million digests take about 130 MB. The number of digests and the tokens of distinct layouts are
bounded. Over a bound, the oldest announcements are forgotten, which costs a payload, never an answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from semel.core import Digest, FeatureInfo, Layout, Modality

__all__ = ["Announced"]


@dataclass(slots=True)
class _Shelf:
    """One layout, and the feature infos that have it."""

    layout: Layout
    holdings: dict[tuple[Modality, int], _Shared] = field(default_factory=dict)


@dataclass(slots=True)
class _Shared:
    """One feature info, shared by all digests with an equal one."""

    holding: FeatureInfo
    shelf: _Shelf
    digests: int = 0


class Announced:
    """The feature infos of one worker, by digest."""

    def __init__(self, max_digests: int, max_tokens: int) -> None:
        self.max_digests = max_digests
        self.max_tokens = max_tokens
        """Maximum number of tokens of all distinct layouts together."""
        self._entries: dict[Digest, _Shared] = {}
        self._shelves: dict[Layout, _Shelf] = {}
        self._tokens = 0

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, digest: Digest) -> FeatureInfo | None:
        """The announced feature info of a digest."""
        shared = self._entries.get(digest)
        return None if shared is None else shared.holding

    def put(self, digest: Digest, holding: FeatureInfo) -> None:
        """Record an announcement, and forget what exceeds the bounds."""
        self.drop(digest)
        shared = self._shared(holding)
        shared.digests += 1
        self._entries[digest] = shared
        while len(self._entries) > self.max_digests or self._tokens > self.max_tokens:
            self.drop(next(iter(self._entries)))

    def drop(self, digest: Digest) -> None:
        """Forget a digest, whether or not it is known."""
        shared = self._entries.pop(digest, None)
        if shared is None:
            return
        shared.digests -= 1
        if shared.digests:
            return
        shelf, holding = shared.shelf, shared.holding
        del shelf.holdings[holding.modality, holding.nbytes]
        if not shelf.holdings:
            del self._shelves[shelf.layout]
            self._tokens -= len(shelf.layout)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._shelves.clear()
        self._tokens = 0

    def _shared(self, holding: FeatureInfo) -> _Shared:
        shelf = self._shelves.get(holding.layout)
        if shelf is None:
            layout = _compact(holding.layout)
            shelf = self._shelves[layout] = _Shelf(layout)
            self._tokens += len(layout)
        key = holding.modality, holding.nbytes
        shared = shelf.holdings.get(key)
        if shared is None:
            shared = shelf.holdings[key] = _Shared(FeatureInfo(*key, shelf.layout), shelf)
        return shared


def _compact(layout: Layout) -> Layout:
    """An equal layout in which equal token ids are one object: a quarter of the memory of a freshly decoded one."""
    ids: dict[int, int] = {}
    return Layout(tuple(ids.setdefault(token, token) for token in layout.token_ids), layout.mask)
