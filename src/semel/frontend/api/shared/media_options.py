"""`media_io_kwargs`: how the videos of a request are read, by vLLM's names and within bounds (threats S5, S15)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from semel.frontend.api.shared.request_base import StrictModel
from semel.media import MAX_FRAMES

__all__ = ["MediaIo", "VideoIo"]

_MAX_FPS = 1_000
_MAX_VIDEO_S = 1_000_000

_Frames = Annotated[int, Field(strict=True, ge=1, le=MAX_FRAMES)]
_Index = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
_Seconds = Annotated[float, Field(strict=True, gt=0, le=_MAX_VIDEO_S)]


class VideoIo(StrictModel):
    """Which frames of a video the model looks at; what a list of frames was taken from."""

    fps: Annotated[float, Field(strict=True, gt=0, le=_MAX_FPS)] | None = None
    num_frames: Annotated[Literal[-1] | _Frames | None, Field(description="-1 is all of them.")] = None
    max_frames: _Frames | None = None
    min_frames: _Frames | None = None
    max_duration: _Seconds | None = None
    frames_indices: Annotated[list[_Index], Field(fail_fast=True, max_length=MAX_FRAMES)] | None = None
    total_num_frames: Annotated[int, Field(strict=True, ge=1, lt=2**31)] | None = None
    duration: Annotated[float, Field(strict=True, ge=0, le=_MAX_VIDEO_S)] | None = None
    do_sample_frames: Annotated[bool, Field(strict=True)] | None = None


class _AsTheyAre(StrictModel):
    """There is nothing to choose: semel reads these by itself."""


class MediaIo(StrictModel):
    """How media are read, by modality."""

    audio: _AsTheyAre | None = None
    image: _AsTheyAre | None = None
    video: VideoIo | None = None

    def options(self) -> dict[str, dict[str, Any]]:
        """Return what the request says, as vLLM takes it."""
        video = {} if self.video is None else self.video.model_dump(exclude_none=True)
        return {"video": video} if video else {}
