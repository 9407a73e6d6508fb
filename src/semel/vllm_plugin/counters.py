"""Counters of the door in this process, which vLLM's own `/metrics` shows (`metrics`)."""

from __future__ import annotations

from collections import Counter
from typing import Final

__all__ = ["COUNTS", "count"]

COUNTS: Final[Counter[str]] = Counter()
"""The events so far, by name."""


def count(name: str, n: int = 1) -> None:
    """Add to a counter."""
    COUNTS[name] += n
