"""No cache: everything works, just without reuse (D4)."""

from __future__ import annotations

from semel.core import Digest, Feature

__all__ = ["NoCache"]


class NoCache:
    """Holds nothing; every feature is used as it was given."""

    @property
    def capacity(self) -> int:
        """The most bytes it may hold: none."""
        return 0

    @property
    def nbytes(self) -> int:
        """The bytes of the features it holds: none."""
        return 0

    @property
    def evictions(self) -> int:
        """How many features it has given up so far: none."""
        return 0

    def __len__(self) -> int:
        return 0

    def __contains__(self, digest: object) -> bool:
        return False

    def __repr__(self) -> str:
        return "NoCache()"

    def get(self, digest: Digest) -> Feature | None:  # noqa: ARG002
        """Nothing."""
        return None

    def put(self, digest: Digest, feature: Feature) -> Feature:  # noqa: ARG002
        """The feature that was given."""
        return feature

    def discard(self, digest: Digest) -> None:
        """Nothing to give up."""

    def clear(self) -> None:
        """Nothing to give up."""

    def close(self) -> None:
        """Nothing to give up."""
