"""What a worker announces to a frontend: what its engine holds from now on, and what it holds no more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from semel.core import Digest, FeatureInfo

__all__ = ["MAX_BATCH", "Announcement", "Gone", "Have"]

MAX_BATCH: Final = 256
"""Digests in one announcement."""


@dataclass(frozen=True, slots=True)
class Have:
    """The engine holds these from now on."""

    number: int
    """Counts the announcements to one peer in one session, from 0, over both kinds."""

    holdings: Mapping[Digest, FeatureInfo]


@dataclass(frozen=True, slots=True)
class Gone:
    """The engine holds these no more."""

    number: int
    digests: tuple[Digest, ...]


Announcement = Have | Gone
