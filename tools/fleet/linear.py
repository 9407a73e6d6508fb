"""The choice as the rules say it, worker by worker: the slow and obvious model of `semel.fleet.balance`.

`shipped` makes the same choice with the shipped code, for a fleet that is described the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from semel.core import Digest
from semel.core.rendezvous import rank
from semel.fleet.balance import Balance


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that takes requests."""

    name: str
    load: int
    """Requests that it is answering or about to."""

    known_items: int
    """How many of the request's items it holds, or is about to get."""


def shipped(candidates: Sequence[Candidate], digests: Sequence[Digest], prefix: bytes = b"") -> int:
    """The index of the worker that the shipped code sends a request with these items to."""
    balance = Balance()
    for number, one in enumerate(candidates):
        balance.put(number, one.name, one.load)
    most = max(one.known_items for one in candidates)
    holders = [sum(1 << n for n, one in enumerate(candidates) if one.known_items > item) for item in range(most)]
    return balance.choose((1 << len(candidates)) - 1, digests, holders, prefix)


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
    least = sorted(loads)[(len(loads) - 1) // 10]
    return least + 3 + 0.1 * sum(loads) / len(loads)


def bound_over_holders(loads: Sequence[int]) -> float:
    """The same for one that holds some of them."""
    return bound_over(loads) + min(0.4 * sum(loads) / len(loads), 2)
