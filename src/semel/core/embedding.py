"""Encoder outputs, as all layers speak of them. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from semel.core.digest import Digest

__all__ = ["Arrival", "Form"]

Form: TypeAlias = tuple[int, int, str]
"""Rows, columns and the name of the dtype, such as "torch.float32"."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """An encoder output that came for one request, in blocks of memory that the engine has mapped."""

    ticket: int
    """Names it once and for all: the engine says of a ticket that it is done with the blocks."""

    digest: Digest
    extents: tuple[tuple[int, int], ...]
    """`(first, count)`: the blocks with its bytes, in order."""

    form: Form
    epoch: int = 0
    """How often the engine had forgotten all encoder outputs when the blocks were set aside; one of before is not used.
    """
