"""Encoder outputs, as all layers speak of them. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from semel.core.digest import Digest

__all__ = ["FORM_DTYPES", "Form", "PrefetchedOutput", "form_bytes"]

Form: TypeAlias = tuple[int, int, str]
"""Rows, columns and the name of the dtype, such as "torch.float32"."""

FORM_DTYPES: Final = {"torch.float32": 4, "torch.float16": 2, "torch.bfloat16": 2, "torch.float64": 8}
"""The dtypes of encoder outputs, and the bytes of each."""


def form_bytes(form: Form) -> int:
    """Return what an output of this form takes; raises ValueError for what no output has."""
    rows, columns, dtype = form
    if min(rows, columns) < 1 or dtype not in FORM_DTYPES:
        raise ValueError(f"no encoder output has the form {form}")
    return rows * columns * FORM_DTYPES[dtype]


@dataclass(frozen=True, slots=True)
class PrefetchedOutput:
    """An encoder output that came for one request, in blocks of memory that the engine has mapped."""

    lease: int
    """Names it once and for all: the engine says of a lease that it is done with the blocks."""

    digest: Digest
    extents: tuple[tuple[int, int], ...]
    """`(first, count)`: the blocks with its bytes, in order."""

    form: Form
    epoch: int = 0
    """Times that the engine had forgotten all outputs when the blocks were set aside; no older one is used."""
