"""Layouts by key: everything that a prompt needs of an item, without its tensors.

Bounded in entries and in tokens; evicts the least recently used. Layouts are stored packed, at 5 bytes per token.
Python integers would take up to 70.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

from semel.core import Layout, LruMap, Mask

__all__ = ["LayoutCache"]

_K = TypeVar("_K", bound=Hashable)


class _Packed(NamedTuple):
    token_ids: array[int]
    bits: bytes | None


class LayoutCache(Generic[_K]):
    """A bounded map from keys to layouts. One thread owns it."""

    def __init__(self, max_entries: int = 65_536, max_tokens: int = 16 << 20) -> None:
        self._packed: LruMap[_K, _Packed] = LruMap(max_tokens, _tokens, max_entries=max_entries)

    @property
    def tokens(self) -> int:
        """Number of tokens of all cached layouts."""
        return self._packed.weight

    def __len__(self) -> int:
        return len(self._packed)

    def __contains__(self, key: object) -> bool:
        return key in self._packed

    def __repr__(self) -> str:
        return f"LayoutCache({len(self):,} layouts, {self.tokens:,} tokens)"

    def get(self, key: _K) -> Layout | None:
        """The layout, which becomes the most recently used."""
        packed = self._packed.get(key)
        if packed is None:
            return None
        return Layout(tuple(packed.token_ids), None if packed.bits is None else Mask(packed.bits))

    def put(self, key: _K, layout: Layout) -> None:
        """Store a layout, unless it is larger than the cache. The first layout under a key stays."""
        if self._packed.get(key) is not None or len(layout) > self._packed.max_weight:
            return
        bits = None if layout.mask is None else layout.mask.bits
        self._packed.put(key, _Packed(array("i", layout.token_ids), bits))

    def clear(self) -> None:
        """Remove every layout."""
        self._packed.clear()


def _tokens(packed: _Packed) -> int:
    return len(packed.token_ids)
