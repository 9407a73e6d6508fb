"""Limits on what media may decode to, and on what processing may use. Values only; the decoders enforce them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from semel.core.flag import GIB, flag

__all__ = ["CANON", "DecodeLimits", "ProcessingLimits"]

CANON: Final = 4
"""Version of the canonical form. Part of every fingerprint, so that a change never mixes features."""


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Limits on what media may decode to."""

    max_image_pixels: int = flag(
        178_956_970,
        help="Maximum width × height of an image, or of a video's frame.",
        group="Media",
        unit="pixels",
        min=1,
    )
    """The default is Pillow's own limit against decompression bombs."""

    min_image_side: int = flag(
        2, help="Minimum length of the shorter side of an image or video, in pixels.", group="Media", min=1
    )
    """One-pixel images have crashed engines (threats S8)."""

    max_audio_s: float = flag(
        3_600.0, help="Maximum length of an audio clip, in seconds.", group="Media", unit="seconds", min=0.001
    )
    max_audio_channels: int = flag(64, help="Maximum number of channels of an audio clip.", group="Media", min=1)
    """All channels are decoded and averaged."""

    max_video_s: float = flag(
        3_600.0, help="Maximum length of a video, in seconds.", group="Media", unit="seconds", min=0.001
    )
    """Every frame up to the last sampled one must be decoded."""

    max_video_frames: int = flag(
        216_000, help="Maximum number of frames of a video, sampled or not.", group="Media", min=1
    )
    """The default is one hour at 60 frames per second."""

    max_video_pixels: int = flag(
        400_000_000,
        help="Maximum number of pixels of all sampled frames of a video together.",
        group="Media",
        unit="pixels",
        min=1,
    )
    """Each pixel takes 3 bytes during processing."""


@dataclass(frozen=True, slots=True)
class ProcessingLimits:
    """Limits on the resources that decoding and preprocessing one item may use."""

    timeout_s: float = flag(
        30.0,
        "max-processing-s",
        help="Timeout for decoding and preprocessing one item, in seconds.",
        group="Preprocessing",
        unit="seconds",
        min=0.1,
    )
    """Counted from the moment when a process starts on the item."""

    max_memory_bytes: int = flag(
        4 * GIB,
        "max-processing-memory-gb",
        help="Maximum memory of one preprocessing process, in GiB, on top of what it needs to start.",
        group="Preprocessing",
        unit="GiB",
        min=0.125,
    )
