"""Features: the result of preprocessing an item, in a form that any process can use.

A tensor here is a dtype, a shape and a buffer. It needs neither torch nor numpy, so the serving process of a frontend
can store, share and send features without importing either. Features are immutable: a buffer never changes after a
feature is created over it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final, Self

from msgspec import Struct

from semel.core.layout import Layout
from semel.core.prompt import Modality

__all__ = ["DTYPE_BYTES", "Feature", "FeatureInfo", "Origin", "Tensor"]

DTYPE_BYTES: Final[Mapping[str, int]] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
"""The dtypes that a feature may have, and the bytes per element."""


@dataclass(frozen=True, slots=True, repr=False)
class Tensor:
    """One array of a feature: row-major and contiguous."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def __post_init__(self) -> None:
        element = DTYPE_BYTES.get(self.dtype)
        if element is None:
            raise ValueError(f"{self.dtype!r} is not a dtype of a feature; those are {', '.join(DTYPE_BYTES)}")
        if min(self.shape, default=0) < 0:
            raise ValueError(f"a tensor cannot have the shape {self.shape}")
        expected = element * prod(self.shape)
        if not self.data.c_contiguous or self.data.nbytes != expected:
            raise ValueError(f"{self!r} needs {expected:,} contiguous bytes, the buffer has {self.data.nbytes:,}")

    @property
    def nbytes(self) -> int:
        """Size of the elements in bytes."""
        return self.data.nbytes

    def __repr__(self) -> str:
        return f"Tensor({self.dtype}, {list(self.shape)})"


class Origin(Struct, frozen=True, array_like=True):
    """The source of an item, without its content: enough to compute the layout again.

    A struct, because it is sent as it is.
    """

    shape: tuple[int, ...]
    """Of an image (height, width), of a clip (samples,), of a video (frames, height, width)."""

    metadata: dict[str, Any] | None = None
    """The numbers of a video's frames and their times, as the model's processor received them."""

    options: dict[str, Any] | None = None
    """The request's `mm_processor_kwargs`."""


@dataclass(frozen=True, slots=True, repr=False)
class Feature:
    """One item as the engine takes it: its tensors, by the model's field names, its layout and its origin.

    The tensors are those of the one item, without the dimension of a batch. A field that is a list of numbers is a
    tensor of one dimension here; the engine's own field says that it is a list.
    """

    modality: Modality
    tensors: Mapping[str, Tensor]
    layout: Layout
    origin: Origin | None = None
    """None for tensors that an outside framework made; it need not say of what."""

    @property
    def nbytes(self) -> int:
        """Size of the tensors in bytes. Caches charge this amount."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={tensor!r}" for name, tensor in self.tensors.items())
        return f"Feature({self.modality}, {fields}, {self.layout!r})"


class FeatureInfo(Struct, frozen=True, gc=False):
    """A feature without its tensors: what a reference by digest needs.

    It is part of no cycle, so the garbage collector leaves it alone, and with it the maps of a frontend that have
    millions of them.
    """

    modality: Modality
    nbytes: int
    layout: Layout

    @classmethod
    def of(cls, feature: Feature) -> Self:
        """Return the info of a feature."""
        return cls(feature.modality, feature.nbytes, feature.layout)

    def __repr__(self) -> str:
        return f"FeatureInfo({self.modality}, {self.nbytes:,} bytes, {self.layout!r})"
