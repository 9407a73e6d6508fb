"""Which worker gets a request: a pure function of digests, ledgers and loads, so any frontend decides alike.

A worker that is busier than a bound over the mean is passed over. Of the others the one that holds most of the items
is taken; what nobody holds goes where its digest says (the highest of a hash of worker and digest), so that equal new
items of different frontends meet at one worker. A request without items goes to the least busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from semel.core import Digest

__all__ = ["Candidate", "choose"]

_SLACK: Final = 1.25
_ALWAYS: Final = 4
"""Requests over the mean that never count as busy: small numbers differ by chance."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that takes requests."""

    name: str
    load: int
    """Requests that it is answering or about to."""

    held: int
    """How many of the request's items it holds."""


def choose(candidates: Sequence[Candidate], digests: Sequence[Digest]) -> int:
    """The index of the worker to send a request with these items to."""
    bound = _SLACK * sum(candidate.load for candidate in candidates) / len(candidates) + _ALWAYS
    fit = [index for index, candidate in enumerate(candidates) if candidate.load <= bound]
    if not digests:
        return min(fit, key=lambda index: (candidates[index].load, candidates[index].name))
    first = min(digests)
    return max(fit, key=lambda index: (candidates[index].held, _affinity(candidates[index].name, first)))


def _affinity(name: str, digest: Digest) -> bytes:
    return blake2b(name.encode(), key=digest, digest_size=8).digest()
