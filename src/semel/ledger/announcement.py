"""A worker's announcements to a frontend: what its engine has stored, and what it has evicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from semel.core import Digest, FeatureInfo

__all__ = ["MAX_BATCH", "Announcement"]

MAX_BATCH: Final = 256
"""Maximum number of digests in one announcement."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """The changes between two numbers, or a slice of all there is.

    Numbers count the worker's changes, not those announced to one peer. So peers that know as much get the
    same, and a peer that comes back can say how much it knows. Digests have the state that they have at the end: to
    hear of a change twice does no harm.
    """

    since: int | None
    """The number that the peer knows everything up to; None for a peer that must forget what it knows."""

    number: int
    """The number that it knows everything up to from now on, once the slices have come."""

    gone: tuple[Digest, ...] = ()
    holdings: Mapping[Digest, FeatureInfo] = field(default_factory=dict)
    more: bool = False
    """True if slices of all there is are still to come."""
