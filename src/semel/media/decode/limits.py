"""What a piece of media may decode to, and what that may take. Values only; the modules that decode keep to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from semel.core.flag import GIB, flag

__all__ = ["CANON", "DecodeLimits", "ProcessingLimits"]

CANON: Final = 4
"""The version of the canonical form; part of every fingerprint, so that changing it never mixes features."""


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """What a piece of media may decode to."""

    max_image_pixels: int = flag(
        178_956_970,
        help="Maximum width × height of an image, or of a video's frame.",
        group="Media",
        unit="pixels",
        min=1,
    )
    """The default is where Pillow itself refuses a bomb."""

    min_image_side: int = flag(
        2, help="Minimum length of the shorter side of an image or video, in pixels.", group="Media", min=1
    )
    """One-pixel images have killed engines (threats S8)."""

    max_audio_s: float = flag(
        3_600.0, help="Maximum length of an audio clip, in seconds.", group="Media", unit="seconds", min=0.001
    )
    max_audio_channels: int = flag(64, help="Maximum number of channels of an audio clip.", group="Media", min=1)
    """They are averaged, and each is decoded for that."""

    max_video_s: float = flag(
        3_600.0, help="Maximum length of a video, in seconds.", group="Media", unit="seconds", min=0.001
    )
    """Every frame up to the last one that is looked at has to be decoded."""

    max_video_frames: int = flag(
        216_000, help="Maximum number of frames of a video, sampled or not.", group="Media", min=1
    )
    """The default is an hour of 60 a second."""

    max_video_pixels: int = flag(
        400_000_000,
        help="Maximum number of pixels of all sampled frames of a video together.",
        group="Media",
        unit="pixels",
        min=1,
    )
    """Each takes 3 bytes while it is processed."""


@dataclass(frozen=True, slots=True)
class ProcessingLimits:
    """What decoding and preprocessing one item may take."""

    timeout_s: float = flag(
        30.0,
        "max-processing-s",
        help="Timeout for decoding and preprocessing one item, in seconds.",
        group="Preprocessing",
        unit="seconds",
        min=0.1,
    )
    """From the moment a process takes the item on."""

    max_memory_bytes: int = flag(
        4 * GIB,
        "max-processing-memory-gb",
        help="Maximum memory of one preprocessing process, in GiB, on top of what it needs to start.",
        group="Preprocessing",
        unit="GiB",
        min=0.125,
    )
