"""Layout of a feature in a range of memory: its tensors in order, each at the next multiple of 64 bytes.

The offsets follow from the tensors' names, dtypes and shapes, so only those are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Final

from semel.cache.shared.arena import align
from semel.core import DTYPE_BYTES, Feature, Layout, Modality, Origin, Tensor
from semel.errors import ProtocolError

__all__ = [
    "Head",
    "borrowed_feature",
    "copy_into",
    "packed_bytes",
    "tensor_heads",
    "tensor_offsets",
    "with_small_copies",
]

_SMALL_BYTES: Final = 4_096
_COUNTS: Final = frozenset({"bool", "int32", "int64"})
"""The dtypes of grids, lengths and masks; what encoders read is of others."""

Head = tuple[str, str, tuple[int, ...]]
"""A tensor's name, dtype and shape: everything except its bytes."""


def tensor_offsets(sizes: Iterable[int]) -> tuple[tuple[int, ...], int]:
    """Return the offsets of tensors of these sizes, and their total size."""
    offsets: list[int] = []
    end = 0
    for size in sizes:
        offsets.append(align(end))
        end = offsets[-1] + size
    return tuple(offsets), end


def tensor_heads(feature: Feature) -> tuple[Head, ...]:
    """Return the heads of a feature's tensors."""
    return tuple((name, tensor.dtype, tensor.shape) for name, tensor in feature.tensors.items())


def packed_bytes(heads: Sequence[Head]) -> int:
    """Return the bytes that these tensors take in one range."""
    return tensor_offsets(_sizes(heads))[1]


def copy_into(view: memoryview, feature: Feature) -> None:
    """Write a feature's tensors to their offsets in a range."""
    offsets, _ = tensor_offsets(tensor.nbytes for tensor in feature.tensors.values())
    for offset, tensor in zip(offsets, feature.tensors.values(), strict=True):
        if tensor.nbytes:
            view[offset : offset + tensor.nbytes] = tensor.data.cast("B")


def borrowed_feature(
    view: memoryview, modality: Modality, heads: Sequence[Head], layout: Layout, origin: Origin | None = None
) -> Feature:
    """Return the feature over a range of memory, without a copy. Its tensors are read-only."""
    sizes = _sizes(heads)
    offsets, total = tensor_offsets(sizes)
    if min(sizes, default=0) < 0 or total > view.nbytes:
        raise ProtocolError(f"tensors of {total:,} bytes were described over a range of {view.nbytes:,}")
    fixed = view.toreadonly()
    try:
        tensors = {
            name: Tensor(dtype, tuple(shape), fixed[offset : offset + size])
            for (name, dtype, shape), offset, size in zip(heads, offsets, sizes, strict=True)
        }
    except ValueError as error:
        raise ProtocolError(f"a peer described no feature: {error}") from error
    return Feature(modality, tensors, layout, origin)


def with_small_copies(feature: Feature) -> Feature:
    """Return the feature with its small tensors, grids and lengths, in memory of this process.

    They decide what is read of the others. A check of them is one of what is used: their lender can no longer change
    them.
    """
    tensors = {
        name: Tensor(tensor.dtype, tensor.shape, memoryview(bytes(tensor.data)))
        if tensor.nbytes <= _SMALL_BYTES and tensor.dtype in _COUNTS
        else tensor
        for name, tensor in feature.tensors.items()
    }
    return Feature(feature.modality, tensors, feature.layout, feature.origin)


def _sizes(heads: Sequence[Head]) -> list[int]:
    return [DTYPE_BYTES.get(dtype, 0) * prod(shape) for _, dtype, shape in heads]
