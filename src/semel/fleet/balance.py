"""Which worker gets a request: a pure function of digests, prefix, ledgers and loads, so any frontend decides alike.

A worker that is busier than a bound over the least busy ones is passed over; the bound is wider for one that holds
some of the items. Of the others those that hold most of the items are taken, and of these the two that the request's
key ranks highest (by a hash of worker and key): the less busy of the two gets it. What nobody holds is ranked by its
digest, so that equal new items of different frontends meet; all else by the opening of its conversation, so that the
next turn goes where the prefix is. A worker that comes or goes moves only what it wins or had.

The bound stands over the load that a tenth of the workers do not reach, not over the least of all: of many workers
somebody is always idle, because it has just come or fails at once, and must not draw everybody's requests. Of up to
ten workers it is the least.

No speeds are known here: a worker that is slow shows it by what it has not answered yet (docs/fleet.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from semel.core import Digest
from semel.core.rendezvous import rank

__all__ = ["Candidate", "bound_over", "bound_over_holders", "choose"]

_ALWAYS: Final = 3
"""Requests over the least busy that never count as busy: small numbers differ by chance."""

_TENTH: Final = 10

_SLACK: Final = 0.1
"""Of the mean, besides."""

_HOLDER_SLACK: Final = 0.4
_HOLDER_MOST: Final = 2
"""Of the mean, and requests at the most, for a worker that holds some of the items: elsewhere they have to be encoded
again. Without a limit, hot items crowd one worker while many requests wait."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that takes requests."""

    name: str
    load: int
    """Requests that it is answering or about to."""

    known_items: int
    """How many of the request's items it holds, or is about to get."""


def choose(candidates: Sequence[Candidate], digests: Sequence[Digest], prefix: bytes = b"") -> int:
    """The index of the worker to send a request with these items to.

    `prefix` stands for the opening of its conversation (at most 64 bytes); empty if there is none to speak of.
    """
    loads = [candidate.load for candidate in candidates]
    bound, holders = bound_over(loads), bound_over_holders(loads)
    fit = [index for index, one in enumerate(candidates) if one.load <= (holders if one.known_items else bound)]
    most = max(candidates[index].known_items for index in fit)
    best = [index for index in fit if candidates[index].known_items == most]
    key = (prefix if most or not digests else b"") or min(digests, default=b"")
    ranked = sorted(best, key=lambda index: rank(candidates[index].name, key), reverse=True)
    return min(ranked[:2] if key else ranked, key=lambda index: candidates[index].load)


def bound_over(loads: Sequence[int]) -> float:
    """The load above which a worker is passed over that holds none of the items."""
    least = sorted(loads)[(len(loads) - 1) // _TENTH]
    return least + _ALWAYS + _SLACK * sum(loads) / len(loads)


def bound_over_holders(loads: Sequence[int]) -> float:
    """The same for one that holds some of them."""
    return bound_over(loads) + min(_HOLDER_SLACK * sum(loads) / len(loads), _HOLDER_MOST)
