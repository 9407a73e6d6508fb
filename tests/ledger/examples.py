"""Digests, and features that carry their digest as their content."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from semel.core import Digest, Feature, FeatureInfo, Layout, Tensor
from semel.ledger import Announcement

SIZES: Final = (1, 2, 2, 3, 4, 11)
"""Sizes of the features, in units of a digest. The last is larger than every store of the tests."""


def digest_of(number: int) -> Digest:
    return Digest(number.to_bytes(32, "little"))


def feature_of(digest: Digest, units: int = 1) -> Feature:
    """A feature whose one tensor repeats its digest."""
    tensor = Tensor("uint8", (units, Digest.size), memoryview(bytes(digest) * units).cast("B", (units, Digest.size)))
    return Feature("image", {"content": tensor}, Layout((7,) * units))


DIGESTS: Final = tuple(digest_of(number) for number in range(len(SIZES)))
FEATURES: Final = {digest: feature_of(digest, units) for digest, units in zip(DIGESTS, SIZES, strict=True)}
HOLDINGS: Final = {digest: FeatureInfo.of(feature) for digest, feature in FEATURES.items()}


def content_of(feature: Feature) -> Digest:
    """Whose feature it is, read from its content."""
    return Digest(feature.tensors["content"].data.tobytes()[: Digest.size])


def have(number: int, holdings: Mapping[Digest, FeatureInfo]) -> Announcement:
    """An announcement of what is there, after the one before; the first one begins a snapshot."""
    return Announcement(number - 1 if number else None, number, holdings=holdings)


def gone(number: int, digests: Iterable[Digest]) -> Announcement:
    """The same of what is gone."""
    return Announcement(number - 1 if number else None, number, tuple(digests))
