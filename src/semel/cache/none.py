"""No cache: everything works, without reuse (D4)."""

from __future__ import annotations

from semel.core import Digest, Feature

__all__ = ["NoCache"]


class NoCache:
    """A cache of nothing; every feature is used as passed."""

    @property
    def capacity(self) -> int:
        """Maximum size in bytes: 0."""
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes of the cached features: 0."""
        return 0

    @property
    def evictions(self) -> int:
        """Number of features evicted so far: 0."""
        return 0

    def __len__(self) -> int:
        return 0

    def __contains__(self, digest: object) -> bool:
        return False

    def __repr__(self) -> str:
        return "NoCache()"

    def nbytes_of(self, tenant: str) -> int:  # noqa: ARG002
        """Return the bytes of a tenant's features: 0."""
        return 0

    def get(self, digest: Digest) -> Feature | None:  # noqa: ARG002
        """Return None."""
        return None

    def put(self, digest: Digest, feature: Feature, *, tenant: str = "") -> Feature:  # noqa: ARG002
        """Return the argument itself."""
        return feature

    def discard(self, digest: Digest) -> None:
        """Do nothing."""

    def clear(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
