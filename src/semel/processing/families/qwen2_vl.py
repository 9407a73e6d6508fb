"""Qwen2-VL: images and video as patches in rows, sized by a grid that travels beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semel.core import Feature, Modality
from semel.processing.families.family import Family
from semel.processing.tensors import to_torch

__all__ = ["Qwen2VL"]


class Qwen2VL(Family):
    """The placeholder stands between two marks; the grid has to fit the patches, or the encoder fails."""

    video_fps = 2.0

    def insertion(self, modality: Modality, index: int, placeholder: str) -> str:
        """The placeholder with the marks that the family's own template writes around it."""
        del modality, index
        return f"<|vision_start|>{placeholder}<|vision_end|>"

    def fault(self, config: Mapping[str, Any], feature: Feature) -> str | None:
        """A grid that does not tile into merged patches, or that does not count the patches that are there."""
        name, pixels = _NAMES[feature.modality]
        merge = int(config["vision_config"].get("spatial_merge_size", 2))
        frames, height, width = to_torch(feature.tensors[name])[0].tolist()
        rows = feature.tensors[pixels].shape[0]
        if min(frames, height, width) < 1 or height % merge or width % merge:
            return f"{name} is {(frames, height, width)}, which does not tile into patches merged {merge}×{merge}"
        if frames * height * width != rows:
            return f"{name} counts {frames * height * width:,} patches, {pixels} has {rows:,}"
        if frames * height * width // merge**2 != feature.layout.num_embeds:
            return f"{name} gives {frames * height * width // merge**2:,} embeddings, {feature.layout!r} has others"
        if (steps := feature.tensors.get("second_per_grid_ts")) is not None:
            (seconds,) = to_torch(steps).tolist()
            if not 0 < seconds * frames <= _MAX_VIDEO_S:  # positions follow it, and their table has an end
                return f"second_per_grid_ts is {seconds:g}, which makes a video of {seconds * frames:g} s"
        return None


_MAX_VIDEO_S = 4 * 3_600
_NAMES: Mapping[Modality, tuple[str, str]] = {
    "image": ("image_grid_thw", "pixel_values"),
    "video": ("video_grid_thw", "pixel_values_videos"),
}
