"""Encoder outputs, as all layers speak of them. Values only."""

from __future__ import annotations

from typing import TypeAlias

__all__ = ["Form"]

Form: TypeAlias = tuple[int, int, str]
"""Rows, columns and the name of the dtype, such as "torch.float32"."""
