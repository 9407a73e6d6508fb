"""Video decoding: only the frames that a model uses, in order, as people see them.

A video is decoded once, from its beginning to the last needed frame; frames between needed ones are decoded and
dropped. Limits are checked against the file's header before decoding, and against the result (threats S5). The display
matrix, with which phones rotate their videos, is applied as players do (S13).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from semel.errors import MediaDegenerate, MediaTooLarge, MediaUndecodable
from semel.media.decode.container import check_codec, open_container
from semel.media.decode.limits import DecodeLimits

if TYPE_CHECKING:
    import av
    import numpy as np

__all__ = ["Video", "VideoHeader", "decode_video"]

_FORMATS: Final = ("avi", "matroska", "mov", "mp4", "mpeg", "ogg", "webm")
_CODECS: Final = (
    *("av1", "h263", "h264", "hevc", "libdav1d", "libvpx", "libvpx-vp9", "mjpeg", "mpeg1video", "mpeg2video", "mpeg4"),
    *("msmpeg4", "prores", "theora", "vp8", "vp9"),
)
_MATRIX: Final = struct.Struct("=9i")  # a, b, u, c, d, v, x, y, w: (p, q) is shown at (ap + cq + x, bp + dq + y)
_PACKETS_PER_FRAME: Final = 2  # one per field in interlaced video
_PACKETS_AHEAD: Final = 64  # packets that a decoder may buffer before its first frame
_NAME: Final = "video"


@dataclass(frozen=True, slots=True)
class VideoHeader:
    """The header of a file's video stream."""

    num_frames: int
    fps: float
    width: int
    height: int

    @property
    def duration_s(self) -> float:
        """Playing time."""
        return self.num_frames / self.fps


@dataclass(frozen=True, slots=True, eq=False)
class Video:
    """The chosen frames of a video."""

    header: VideoHeader
    indices: tuple[int, ...]
    """The index in the video of each frame."""

    frames: np.ndarray
    """RGB, of shape (frames, height, width, 3)."""


def decode_video(data: bytes, limits: DecodeLimits, *, choose: Callable[[VideoHeader], Sequence[int]]) -> Video:
    """Decode the frames that `choose` returns, by number in ascending order. A frame number may occur twice."""
    import numpy as np

    with open_container(
        data, name=_NAME, formats=_FORMATS, codecs=_CODECS, max_pixels=limits.max_image_pixels
    ) as container:
        stream = container.streams.video[0]
        check_codec(stream, _CODECS, name=_NAME, instead="H.264, HEVC, VP8, VP9 or AV1")
        header = _header(stream, container.duration)
        _check(header, limits)
        indices = tuple(choose(header))
        _check_frames(header, len(set(indices)), limits)
        # The codec's own data may state another size than the container, and the decoder reads it first.
        stream.codec_context.options = {"max_pixels": str(limits.max_image_pixels)}
        stream.codec_context.thread_count = 1
        frames = _read(container, header, set(indices))
        found = tuple(index for index in indices if index in frames)
        if not found:
            raise MediaDegenerate("the video has none of the frames that the model looks at")
        return Video(header, found, np.stack([frames[index] for index in found]))


def _header(stream: av.VideoStream, container_duration: int | None) -> VideoHeader:
    """The header as other users of FFmpeg read it: the number of frames is a product if the file does not state it."""
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
    limits.check_size(header.width, header.height, name=_NAME)
    limits.check_length(header.num_frames, header.duration_s)


def _check_frames(header: VideoHeader, count: int, limits: DecodeLimits) -> None:
    pixels = count * header.width * header.height
    if pixels > limits.max_video_pixels:
        raise MediaTooLarge(
            f"{count} frames of the video have {pixels:,} pixels; the limit is {limits.max_video_pixels:,} "
            f"(--max-video-pixels): send a shorter or a smaller one"
        )


def _read(
    container: av.container.InputContainer, header: VideoHeader, wanted: Collection[int]
) -> dict[int, np.ndarray]:
    from av.video.reformatter import VideoReformatter

    # One reformatter for all frames, without threads: a frame's own starts a thread for each core, until it is
    # collected.
    reformatter = VideoReformatter()
    frames: dict[int, np.ndarray] = {}
    last = max(wanted, default=-1)
    shown_as: _Turn | None = None
    for number, frame in enumerate(_decode(container, last + 1)):
        if (frame.width, frame.height) != (header.width, header.height):
            raise ValueError(f"frame {number} has another size than the video says")
        turn = _Turn.of(frame)
        if (shown_as := shown_as or turn) != turn:
            raise MediaUndecodable("the video turns its frames while it plays; send one that does not")
        if number in wanted:
            frames[number] = turn.apply(reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray())
        if number >= last:
            break
    return frames


def _decode(container: av.container.InputContainer, count: int) -> Iterator[av.VideoFrame]:
    """The first `count` frames. The number of packets is bounded too: a file can have many packets and no frames."""
    limit = _PACKETS_PER_FRAME * count + _PACKETS_AHEAD
    for number, packet in enumerate(container.demux(container.streams.video[0])):
        if number > limit:
            raise MediaTooLarge(f"the video has over {limit:,} packets up to its frame {count:,}; encode it again")
        yield from packet.decode()


@dataclass(frozen=True, slots=True)
class _Turn:
    """The display transform of a frame's pixels: transpose first, then mirror."""

    swapped: bool
    mirrored_x: bool
    mirrored_y: bool

    @classmethod
    def of(cls, frame: av.VideoFrame) -> Self:
        """Return the display matrix of a frame, to the nearest quarter turn; without one, no rotation."""
        if (matrix := frame.side_data.get("DISPLAYMATRIX")) is None:
            return cls(False, False, False)
        a, b, _, c, d, *_ = _MATRIX.unpack(bytes(matrix)[: _MATRIX.size])
        if abs(b) + abs(c) > abs(a) + abs(d):
            return cls(True, c < 0, b < 0)
        return cls(False, a < 0, d < 0)

    def apply(self, pixels: np.ndarray) -> np.ndarray:
        """Return the pixels as displayed."""
        upright = pixels.swapaxes(0, 1) if self.swapped else pixels
        return upright[:: -1 if self.mirrored_y else 1, :: -1 if self.mirrored_x else 1]
