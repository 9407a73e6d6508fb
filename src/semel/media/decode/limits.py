"""What a piece of media may decode to. Values only; the modules beside this one keep to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["CANON", "DecodeLimits"]

CANON: Final = 4
"""The version of the canonical form; part of every fingerprint, so that changing it never mixes features."""


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """What a piece of media may decode to. Every field is a flag of `semel serve` and `semel frontend`."""

    max_image_pixels: int = 178_956_970
    """Width × height of an image, or of a frame of a video; the default is where Pillow itself refuses a bomb."""

    min_image_side: int = 2
    """Shortest side of an image in pixels. One-pixel images have killed engines (threats S8)."""

    max_audio_s: float = 3_600.0
    """Length of a clip in seconds."""

    max_audio_channels: int = 64
    """Channels of a clip. They are averaged, and each is decoded for that."""

    max_video_s: float = 3_600.0
    """Length of a video in seconds: every frame up to the last one that is looked at has to be decoded."""

    max_video_frames: int = 216_000
    """Frames of a video, looked at or not; the default is an hour of 60 a second."""

    max_video_pixels: int = 400_000_000
    """Pixels of all the frames of a video that are looked at; each takes 3 bytes while it is processed."""
