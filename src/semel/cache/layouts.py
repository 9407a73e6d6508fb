"""Layouts by key: everything that a prompt needs of an item, without its tensors.

Bounded in entries and in tokens; evicts the least recently used. A layout is kept as its runs, at 12 bytes per token if
all its tokens differ, and mostly at 150 bytes in all.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

from semel.core import Layout, LruMap

__all__ = ["LayoutCache"]

_K = TypeVar("_K", bound=Hashable)


class LayoutCache(LruMap[_K, Layout]):
    """A bounded map from keys to layouts, whose weight is in tokens. One thread owns it."""

    __slots__ = ()

    def __init__(self, max_entries: int = 65_536, max_tokens: int = 16 << 20) -> None:
        super().__init__(max_tokens, len, max_entries=max_entries)

    def put(self, key: _K, value: Layout) -> list[_K]:
        """Store a layout, unless it is larger than the cache. The first layout under a key stays."""
        return super().put(key, value) if self.get(key) is None else []
