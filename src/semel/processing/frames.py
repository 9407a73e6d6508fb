"""Which frames of a video a model looks at, by the rule of its own HF video processor; what that is told of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from semel.errors import MediaDegenerate
from semel.media import VideoHeader

__all__ = ["choose_frames", "describe_frames"]


def choose_frames(video_processor: Any, header: VideoHeader, *, fps: float) -> list[int]:
    """The numbers of the frames that are looked at."""
    from transformers.video_utils import VideoMetadata

    try:
        chosen = video_processor.sample_frames(VideoMetadata(**describe_frames(header)), fps=fps)
    except (ValueError, ArithmeticError):
        raise MediaDegenerate(f"the video has {header.num_frames} frames, too few for this model") from None
    # A step in float32 can end one past the last frame.
    return [min(index, header.num_frames - 1) for index in chosen.tolist()]


def describe_frames(header: VideoHeader, indices: Sequence[int] | None = None) -> Mapping[str, Any]:
    """The fields of transformers' `VideoMetadata`."""
    return {
        "total_num_frames": header.num_frames,
        "fps": header.fps,
        "duration": header.duration_s,
        "frames_indices": None if indices is None else list(indices),
    }
