"""The flags that bound what media may decode to; `semel.media.DecodeLimits` says what each one means."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from semel.media.decode.limits import DecodeLimits

__all__ = [
    "DEFAULTS",
    "MaxAudioChannels",
    "MaxAudioS",
    "MaxImagePixels",
    "MaxProcessingGb",
    "MaxProcessingS",
    "MaxVideoFrames",
    "MaxVideoPixels",
    "MaxVideoS",
    "MinImageSide",
]

DEFAULTS: Final = DecodeLimits()

MaxImagePixels = Annotated[int, typer.Option(min=1, help="Width × height of an image, or of a frame of a video.")]
MinImageSide = Annotated[int, typer.Option(min=1, help="The shortest side of an image or video, in pixels.")]
MaxAudioS = Annotated[float, typer.Option(min=0.001, help="Seconds of a clip.")]
MaxAudioChannels = Annotated[int, typer.Option(min=1, help="Channels of a clip.")]
MaxVideoS = Annotated[float, typer.Option(min=0.001, help="Seconds of a video.")]
MaxVideoFrames = Annotated[int, typer.Option(min=1, help="Frames of a video, looked at or not.")]
MaxVideoPixels = Annotated[int, typer.Option(min=1, help="Pixels of all the frames of a video that are looked at.")]
MaxProcessingS = Annotated[float, typer.Option(min=0.1, help="Seconds to decode and preprocess one item.")]
MaxProcessingGb = Annotated[
    float, typer.Option(min=0.125, help="GiB for one preprocessing process, on top of what it needs to start.")
]
