"""Idefics3: an image in tiles, with marks between them that take no embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semel.core import Feature
from semel.processing.families.family import Family
from semel.processing.tensors import to_torch

__all__ = ["Idefics3"]


class Idefics3(Family):
    """An item's tiles travel with their number; every tile has the same number of embeddings."""

    separates_text = True
    layout_from_size = True
    batched = frozenset({"num_patches"})

    def tensors(self, output: Mapping[str, Any]) -> Mapping[str, Any]:
        """The tiles of the one image, without the dimension of a batch, and how many they are."""
        import torch

        tiles = {name: value[0] for name, value in output.items()}
        return {**tiles, "num_patches": torch.tensor([len(tiles["pixel_values"])])}

    def check(self, config: Mapping[str, Any], feature: Feature) -> str | None:
        """Tiles that are not counted right, that the encoder would drop, or in which it would see nothing."""
        import torch

        pixels, mask, count = (to_torch(feature.tensors[name]) for name in _NAMES)
        if int(count) != len(pixels) or len(mask) != len(pixels):
            return f"num_patches is {int(count)}, pixel_values has {len(pixels)} tiles, the mask {len(mask)}"
        if not bool(pixels.flatten(1).any(dim=1).all()):
            return "pixel_values has a tile of nothing but zeros, which the encoder leaves out"
        rows, columns = mask[:, :, :1], mask[:, :1, :]
        if not torch.equal(mask, rows * columns) or not bool(_leading(rows[..., 0]) and _leading(columns[:, 0])):
            return "pixel_attention_mask does not show one rectangle of each tile, from its upper left corner"
        tower = config["vision_config"]
        embeds = len(pixels) * (tower["image_size"] // tower["patch_size"] // config["scale_factor"]) ** 2
        if embeds != feature.layout.num_embeds:
            return f"pixel_values gives {embeds:,} embeddings, {feature.layout!r} has others"
        return None


_NAMES = ("pixel_values", "pixel_attention_mask", "num_patches")


def _leading(lines: Any) -> bool:
    """Whether every line is a run of ones, at least one, followed by zeros."""
    return bool((lines[:, 0] == 1).all() and (lines[:, 1:] <= lines[:, :-1]).all() and (lines >= 0).all())
