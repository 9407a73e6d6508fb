"""Whisper: one clip goes to the encoder, whose prompt has a fixed number of positions; the decoder's has text only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from semel.core import Feature, Layout
from semel.processing.families.family import Family

__all__ = ["Whisper"]


class Whisper(Family):
    """Every clip is padded or cut to the encoder's length, so every layout is the same."""

    encoder_decoder = True
    batched = frozenset({"input_features"})

    def layout(self, config: Mapping[str, Any], replacement: Sequence[int]) -> Layout:
        """The encoder's positions; it has no tokens of its own, and 0 stands for each."""
        del replacement
        return Layout((0,) * int(config["max_source_positions"]))

    def check(self, config: Mapping[str, Any], feature: Feature) -> str | None:
        """Another number of positions than the encoder has."""
        if len(feature.layout) != config["max_source_positions"] or feature.layout.mask is not None:
            return f"{feature.layout!r}, the encoder has {config['max_source_positions']} positions"
        return None
