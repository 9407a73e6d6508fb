"""Process-wide counters of the door, which vLLM's own `/metrics` shows."""

from __future__ import annotations

from collections import Counter

__all__ = ["COUNTS", "count"]

COUNTS: Counter[str] = Counter()


def count(name: str, n: int = 1) -> None:
    """Count so many more of something."""
    COUNTS[name] += n
