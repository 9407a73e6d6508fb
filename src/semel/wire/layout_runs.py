"""Layouts in messages: as runs, each distinct one once. Layouts that are announced again and again are one object.

Used between frontend and worker, and between a frontend and its preprocessing processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from semel.core import FeatureInfo, Layout, Modality
from semel.wire.messages import Runs

__all__ = ["to_info", "to_layouts", "to_runs"]

_MAX_LAYOUT_TOKENS: Final = 1 << 20
_MAX_ANNOUNCED_TOKENS: Final = 1 << 23  # of all layouts in one message
_MAX_INTERNED_BYTES: Final = 1 << 10
_INTERNED: Final = 1 << 14
"""Layouts, and feature infos, of which this process keeps one object each: at most 16 MB, mostly 2."""


def to_runs(layout: Layout) -> Runs:
    """Return a layout as it is sent."""
    return Runs(layout.token_runs, layout.mask_runs)


def to_layouts(announced: Sequence[Runs]) -> list[Layout]:
    """Return the layouts of a message; raises ValueError if they are broken or have too many tokens."""
    layouts = [
        (_interned_layout if len(runs.token_ids) + len(runs.mask or b"") <= _MAX_INTERNED_BYTES else _layout_of)(runs)
        for runs in announced
    ]
    if (tokens := sum(map(len, layouts))) > _MAX_ANNOUNCED_TOKENS:
        raise ValueError(f"its layouts have {tokens:,} tokens, at most {_MAX_ANNOUNCED_TOKENS:,} are taken")
    return layouts


@lru_cache(_INTERNED)
def to_info(modality: Modality, nbytes: int, layout: Layout) -> FeatureInfo:
    """Return a feature info; equal ones that were asked for lately are one object."""
    return FeatureInfo(modality, nbytes, layout)


def _layout_of(runs: Runs) -> Layout:
    return Layout.of_runs(runs.token_ids, runs.mask, max_tokens=_MAX_LAYOUT_TOKENS)


_interned_layout = lru_cache(_INTERNED)(_layout_of)
