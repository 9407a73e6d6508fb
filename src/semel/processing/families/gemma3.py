"""Gemma 3: images of one size between two marks, set off from the text by blank lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from semel.core import Feature, Modality
from semel.errors import ConfigError
from semel.processing.families.family import Family
from semel.processing.tensors import to_torch

__all__ = ["Gemma3"]


class Gemma3(Family):
    """A layout reaches from mark to mark; the blank lines around it belong to the text.

    Newlines before and behind an image become one token with its blank lines, and two images share the lines between
    them. So the lines are written before the prompt is tokenised, as transformers does.
    """

    separates_text = True
    layout_from_size = True
    batched = frozenset({"num_patches"})

    options = Family.options - {"do_pan_and_scan"}
    """Crops would come with words before the image; vLLM advises against them, and its contract admits one size."""

    def placeholder_text(self, modality: Modality, placeholder: str) -> str:
        """The placeholder between blank lines."""
        del modality
        return f"\n\n{placeholder}\n\n"

    def tensors(self, output: Mapping[str, Any]) -> Mapping[str, Any]:
        """The pixels, and of how many images they are."""
        import torch

        return {**output, "num_patches": torch.tensor([len(output["pixel_values"])])}

    def item_tokens(self, config: Mapping[str, Any], replacement: Sequence[int]) -> slice:
        """From the start mark to the end mark."""
        start, end = config["boi_token_index"], config["eoi_token_index"]
        if list(replacement[1:2]) != [start] or list(replacement[-2:-1]) != [end]:
            raise ConfigError("an image is not between blank lines: start the engine without do_pan_and_scan")
        return slice(1, -1)

    def check(self, config: Mapping[str, Any], feature: Feature) -> str | None:
        """Images that are not counted right, or that give another number of embeddings than the layout."""
        images = feature.tensors["pixel_values"].shape[0]
        if (count := int(to_torch(feature.tensors["num_patches"]))) != images:
            return f"num_patches is {count}, pixel_values has {images} images"
        embeds = images * int(config["mm_tokens_per_image"])
        if embeds != feature.layout.num_embeds:
            return f"pixel_values gives {embeds:,} embeddings, {feature.layout!r} has others"
        return None
