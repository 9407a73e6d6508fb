"""Qwen2-Audio: clips as spectrograms of 30 s, with a mask that says how much of it is sound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semel.core import Feature, Modality
from semel.processing.families.family import Family
from semel.processing.tensors import to_torch

__all__ = ["Qwen2Audio"]


class Qwen2Audio(Family):
    """Clips are numbered in the prompt; how many embeddings a clip has follows from its mask."""

    separates_text = True
    batched = frozenset({"feature_attention_mask", "input_features"})

    def insertion(self, modality: Modality, index: int, placeholder: str) -> str:
        """The line that the family's own template writes for a clip, without its end."""
        del modality
        return f"Audio {index}: <|audio_bos|>{placeholder}<|audio_eos|>"

    def check(self, config: Mapping[str, Any], feature: Feature) -> str | None:
        """A mask with holes, or one that gives another number of embeddings than the layout."""
        del config
        mask = to_torch(feature.tensors["feature_attention_mask"])
        frames = int(mask.sum())
        if not bool((mask[:frames] == 1).all()) or bool(mask[frames:].any()):
            return "feature_attention_mask is not a run of ones followed by zeros"
        embeds = ((frames - 1) // 2 + 1 - 2) // 2 + 1  # two convolutions of the tower: stride 2, then pooling by 2
        if embeds != feature.layout.num_embeds:
            return f"feature_attention_mask gives {embeds} embeddings, {feature.layout!r} has others"
        return None
