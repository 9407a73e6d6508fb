"""Features whose bytes follow from a number, so that anyone can tell whether they are right."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import shake_128

from semel.core import Digest, Feature, Layout, Mask, Tensor


def digest_of(number: int) -> Digest:
    return Digest(number.to_bytes(32, "little"))


def content(number: int, place: int, nbytes: int) -> bytes:
    return shake_128(f"{number}.{place}".encode()).digest(nbytes)


def feature_of(number: int, *sizes: int) -> Feature:
    """A feature with a tensor of each size; its bytes, layout and mask are those of the number."""
    tensors = {
        f"field{place}": Tensor("uint8", (1, size), memoryview(content(number, place, size)))
        for place, size in enumerate(sizes)
    }
    return Feature("image", tensors, Layout((number, number + 1), Mask([True, bool(number % 2)])))


def described(feature: Feature) -> object:
    """All that makes two features equal."""
    tensors = [(name, tensor.dtype, tensor.shape, tensor.data.tobytes()) for name, tensor in feature.tensors.items()]
    mask = feature.layout.mask
    return feature.modality, tensors, feature.layout.token_ids, None if mask is None else mask.bits


def assert_equal(feature: Feature | None, number: int, sizes: Sequence[int]) -> None:
    assert feature is not None
    assert described(feature) == described(feature_of(number, *sizes))
