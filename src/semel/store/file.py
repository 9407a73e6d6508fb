"""A file in the media store, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from semel.core import Digest, Modality

__all__ = ["StoredFile"]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Everything that is known of a file without reading it: its object's name and size say all of it."""

    id: Digest
    """Keyed by its owner and its content: no two owners have a file in common."""

    owner: str
    """A tenant, as `names.owner_name` calls it."""

    nbytes: int
    revision: int
    """Number of uploads. Of two objects of one file, the one with the higher revision counts."""

    created_s: int
    """Time of the first upload, in seconds since 1970."""

    expires_s: int
    """From when on it is gone."""

    modality: Modality | None
    """The modality as which a chat uses it; None if it cannot."""

    purpose: str
    name: str
    """Its file name, as its client called it."""
