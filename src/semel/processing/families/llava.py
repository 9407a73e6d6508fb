"""LLaVA: images of one size, an embedding for each patch of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from semel.core import Feature
from semel.processing.families.family import Family

__all__ = ["Llava"]

_CLASS_TOKENS: Final[Mapping[str, int]] = {"clip_vision_model": 1, "siglip_vision_model": 0}


class Llava(Family):
    """How many embeddings an image has follows from its pixels, which vLLM does not tell by itself."""

    separates_text = True
    layout_from_size = True
    batched = frozenset({"pixel_values"})

    def describes(self, config: Mapping[str, Any]) -> bool:
        """Not if the tower is Pixtral's, whose images are of any size."""
        return config.get("vision_config", {}).get("model_type", "clip_vision_model") in _CLASS_TOKENS

    def check(self, config: Mapping[str, Any], feature: Feature) -> str | None:
        """Pixels that give another number of embeddings than the layout."""
        tower = config["vision_config"]
        embeds = _CLASS_TOKENS[tower["model_type"]]
        *_, height, width = feature.tensors["pixel_values"].shape
        embeds += (height // tower["patch_size"]) * (width // tower["patch_size"])
        if config.get("vision_feature_select_strategy", "default") == "default":
            embeds -= 1
        if embeds != feature.layout.num_embeds:
            return f"pixel_values gives {embeds:,} embeddings, {feature.layout!r} has others"
        return None
