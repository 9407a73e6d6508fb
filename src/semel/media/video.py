"""Decoding videos: the frames that a model looks at, in order, as people see them, and no more of them.

A video is walked once, from its beginning to the last frame that is wanted; frames between are decoded but not kept.
Limits are checked on what the file says of itself before anything is decoded, and on what comes out (threats S5).
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from semel.errors import MediaDegenerate, MediaTooLarge, MediaUndecodable
from semel.media.decode import DecodeLimits

if TYPE_CHECKING:
    import av
    import numpy as np

__all__ = ["Video", "VideoHeader", "decode_video"]

_FORMATS: Final = ("avi", "matroska", "mov", "mp4", "mpeg", "ogg", "webm")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VideoHeader:
    """What a file says of its video."""

    num_frames: int
    fps: float
    width: int
    height: int

    @property
    def duration_s(self) -> float:
        """How long it plays."""
        return self.num_frames / self.fps


@dataclass(frozen=True, slots=True, eq=False)
class Video:
    """The frames of a video that were asked for."""

    header: VideoHeader
    indices: tuple[int, ...]
    """Which frame of the video each one is."""

    frames: np.ndarray
    """RGB, of the shape (frames, height, width, 3)."""


def decode_video(data: bytes, limits: DecodeLimits, *, choose: Callable[[VideoHeader], Sequence[int]]) -> Video:
    """The frames that `choose` wants of a video, by their numbers in ascending order; a frame may be wanted twice."""
    import av
    import numpy as np

    try:
        options = {"format_whitelist": ",".join(_FORMATS), "protocol_whitelist": ""}
        with av.open(io.BytesIO(data), mode="r", container_options=options) as container:
            stream = container.streams.video[0]
            header = _header(stream, container.duration)
            _check(header, limits)
            indices = tuple(choose(header))
            _check_frames(header, len(set(indices)), limits)
            frames = _read(container, header, set(indices))
            found = tuple(index for index in indices if index in frames)
            if not found:
                raise MediaDegenerate("the video has none of the frames that the model looks at")
            return Video(header, found, np.stack([frames[index] for index in found]))
    except (av.error.FFmpegError, IndexError, ValueError, OverflowError) as error:
        logger.info("a video of %d bytes does not decode: %r", len(data), error)
        raise MediaUndecodable(f"the video ({len(data):,} bytes) does not decode; send a complete file") from None


def _header(stream: av.VideoStream, container_duration: int | None) -> VideoHeader:
    """The counts as FFmpeg's users read them: the number of frames is a product where the file does not tell it."""
    import av

    fps = float(stream.guessed_rate or stream.average_rate or 0)
    if fps <= 0:
        raise MediaDegenerate("the video does not say how many frames a second has")
    frames = stream.frames
    if not frames:
        if stream.duration is not None and stream.time_base is not None:
            duration_s = float(stream.duration * stream.time_base)
        else:
            duration_s = (container_duration or 0) / av.time_base
        frames = int(duration_s * fps + 0.5)
    if frames < 1:
        raise MediaDegenerate("the video does not say how long it is")
    return VideoHeader(frames, fps, stream.width, stream.height)


def _check(header: VideoHeader, limits: DecodeLimits) -> None:
    width, height = header.width, header.height
    if min(width, height) < limits.min_image_side:
        raise MediaDegenerate(f"the video is {width}×{height}; each side needs {limits.min_image_side} pixels")
    if width * height > limits.max_image_pixels:
        raise MediaTooLarge(
            f"the video is {width}×{height}, {width * height:,} pixels; the limit is {limits.max_image_pixels:,}"
        )
    if header.duration_s > limits.max_video_s:
        raise MediaTooLarge(f"the video is longer than the limit of {limits.max_video_s:g} s")


def _check_frames(header: VideoHeader, count: int, limits: DecodeLimits) -> None:
    pixels = count * header.width * header.height
    if pixels > limits.max_video_pixels:
        raise MediaTooLarge(
            f"{count} frames of the video have {pixels:,} pixels; the limit is {limits.max_video_pixels:,}: send a "
            "shorter or a smaller one"
        )


def _read(
    container: av.container.InputContainer, header: VideoHeader, wanted: Collection[int]
) -> dict[int, np.ndarray]:
    frames: dict[int, np.ndarray] = {}
    last = max(wanted, default=-1)
    for number, frame in enumerate(container.decode(container.streams.video[0])):
        if (frame.width, frame.height) != (header.width, header.height):
            raise ValueError(f"frame {number} has another size than the video says")
        if number in wanted:
            frames[number] = frame.to_ndarray(format="rgb24")
        if number >= last:
            break
    return frames
