"""Preprocessings of items that were preprocessed before, by cause. Pure; simulated fleets and real ones are counted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

__all__ = ["CAUSES", "Cause", "Preprocessing", "causes_of"]

Cause = Literal["other worker", "same time", "not announced", "evicted"]

CAUSES: Final[tuple[Cause, ...]] = ("other worker", "same time", "not announced", "evicted")
"""Of a further preprocessing. A worker had announced the item, but the request went to another one. Another frontend
was making it at the same time. It had made it, but no worker had announced it yet. Or this frontend had made it
itself, and kept it no longer."""


class Preprocessing(NamedTuple):
    """An item that a frontend has preprocessed, and when by a clock that all frontends share."""

    digest: str
    frontend: str
    began: float
    ended: float
    is_announced: bool
    """True if any worker had announced the item to this frontend."""


def causes_of(made: Iterable[Preprocessing]) -> Counter[Cause]:
    """Count the preprocessings that are not the first of their item, by cause."""
    found: Counter[Cause] = Counter()
    before: defaultdict[str, list[Preprocessing]] = defaultdict(list)
    for one in sorted(made, key=lambda one: one.began):
        if earlier := before[one.digest]:
            found[_cause(one, earlier)] += 1
        earlier.append(one)
    return found


def _cause(one: Preprocessing, earlier: Iterable[Preprocessing]) -> Cause:
    if any(other.frontend == one.frontend for other in earlier):
        return "evicted"
    if one.is_announced:
        return "other worker"
    return "same time" if one.began < min(other.ended for other in earlier) else "not announced"
