"""Limits on what media may decode to, and on what processing may use. The decoders enforce them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from semel.core.flag import GIB, MIB, Group, flag
from semel.errors import MediaDegenerate, MediaTooLarge

__all__ = ["CANON", "DecodeLimits", "DocumentLimits", "ProcessingLimits"]

CANON: Final = 4
"""Version of the canonical form. Part of every fingerprint, so that a change never mixes features."""


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Limits on what media may decode to."""

    GROUP: ClassVar[Group] = "Media"

    max_image_pixels: int = flag(
        178_956_970, help="Maximum width × height of an image, or of a video's frame.", unit="pixels", min=1
    )
    """The default is Pillow's own limit against decompression bombs."""

    min_image_side: int = flag(2, help="Minimum length of the shorter side of an image or video, in pixels.", min=1)
    """One-pixel images have crashed engines (threats S8)."""

    max_audio_s: float = flag(3_600.0, help="Maximum length of an audio clip, in seconds.", unit="seconds", min=0.001)
    max_audio_channels: int = flag(64, help="Maximum number of channels of an audio clip.", min=1)
    max_video_s: float = flag(3_600.0, help="Maximum length of a video, in seconds.", unit="seconds", min=0.001)
    """Every frame up to the last sampled one must be decoded."""

    max_video_frames: int = flag(216_000, help="Maximum number of frames of a video, sampled or not.", min=1)
    max_video_pixels: int = flag(
        400_000_000, help="Maximum number of pixels of all sampled frames of a video together.", unit="pixels", min=1
    )
    """Each pixel takes 3 bytes during processing."""

    def check_size(self, width: int, height: int, *, name: str) -> None:
        """Refuse an image, or a video's frame, that is too small or too large; messages call it `name`."""
        if min(width, height) < self.min_image_side:
            raise MediaDegenerate(
                f"the {name} is {width}×{height}; each side needs {self.min_image_side} pixels (--min-image-side)"
            )
        if width * height > self.max_image_pixels:
            raise MediaTooLarge(
                f"the {name} is {width}×{height}, {width * height:,} pixels; the limit is {self.max_image_pixels:,} "
                f"(--max-image-pixels)"
            )

    def check_length(self, frames: int, seconds: float) -> None:
        """Refuse a video that says it has more frames, or seconds."""
        if seconds > self.max_video_s:
            raise MediaTooLarge(f"the video is longer than the limit of {self.max_video_s:g} s (--max-video-s)")
        if frames > self.max_video_frames:
            raise MediaTooLarge(
                f"the video has {frames:,} frames; the limit is {self.max_video_frames:,} (--max-video-frames)"
            )

    def check_rate(self, duration_s: float, fps: float) -> None:
        """Refuse so many frames a second of a video that they would be more than it may have, before they are named."""
        if duration_s * fps > self.max_video_frames:
            raise MediaTooLarge(
                f"{fps:g} frames a second of a video of {duration_s:g} s are more than {self.max_video_frames:,} "
                "(--max-video-frames)"
            )


@dataclass(frozen=True, slots=True)
class DocumentLimits:
    """Limits on the documents of a request, whose pages become images."""

    GROUP: ClassVar[Group] = "Media"

    max_pages: int = flag(
        256, "max-document-pages", help="Maximum number of pages of all documents of a request.", min=1
    )
    """Only of those in a document's `page_range`, if it has one."""

    max_bytes: int = flag(64 * MIB, "max-document-bytes", help="Maximum size of one document.", unit="bytes", min=1)
    """A document goes into the pool once for each page."""

    max_dpi: int = flag(
        300, "max-document-dpi", help="Maximum resolution of a document's pages, in dots per inch.", min=1
    )
    default_dpi: int = 150
    """The resolution without the part's own `dpi`, or `max_dpi` if that is lower."""


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
