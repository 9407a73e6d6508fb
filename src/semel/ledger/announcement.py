"""A worker's announcements to a frontend: what its engine has stored, and what it has evicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from semel.core import Digest, FeatureInfo

__all__ = ["MAX_BATCH", "Announcement", "Gone", "Have"]

MAX_BATCH: Final = 256
"""Maximum number of digests in one announcement."""


@dataclass(frozen=True, slots=True)
class Have:
    """The engine has these from now on."""

    number: int
    """Counts the announcements of both kinds to one peer in one session, from 0."""

    holdings: Mapping[Digest, FeatureInfo]


@dataclass(frozen=True, slots=True)
class Gone:
    """The engine no longer has these."""

    number: int
    digests: tuple[Digest, ...]


Announcement = Have | Gone
