"""Counts of what the door does in this process."""

from __future__ import annotations

from collections import Counter

__all__ = ["COUNTS", "count"]

COUNTS: Counter[str] = Counter()


def count(name: str, n: int = 1) -> None:
    """Add to a count."""
    COUNTS[name] += n
