"""A video as a list of images: `data:video/jpeg;base64,FRAME,FRAME,…`, vLLM's form for frames that a client has chosen.

The media is the text of the data URL, its head as here: so its bytes say what it is, and are its identity. Frames are
counted before one is decoded, and each one's pixels before it is (threats S5); a frame is decoded as an image is (S13).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from semel.errors import InvalidRequest, MediaError, MediaTooLarge, MediaUndecodable
from semel.media.decode.image import decode_image, size_from_header
from semel.media.decode.limits import DecodeLimits
from semel.media.decode.video import Video, VideoHeader

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["FRAME_LIST", "MAX_FRAMES", "MISFIT", "FrameReader", "count_frames", "decode_frames"]

FRAME_LIST: Final = b"data:video/jpeg;base64,"
"""The first bytes of every list of frames."""

MAX_FRAMES: Final = 65_536
"""Of one list: an engine takes no more of an item."""

MISFIT: Final = (
    "media_io_kwargs.video: frames_indices needs a number for each frame that is used, and total_num_frames counts "
    "these at least"
)
_NUM_FRAMES: Final = 32
"""How many are used, unless the request says it."""

_PIECE: Final = 1 << 18


def count_frames(data: bytes) -> int:
    """Return how many frames a list has, or more than `MAX_FRAMES`; a piece at a time, so that other threads run.

    Each has a comma before it.
    """
    count = 0
    for start in range(0, len(data), _PIECE):
        count += data.count(b",", start, start + _PIECE)
        if count > MAX_FRAMES:
            break
    return count


def decode_frames(data: bytes, limits: DecodeLimits, options: Mapping[str, Any]) -> Video:
    """Decode the frames that are used of a list; `options` are the `media_io_kwargs` of videos."""
    import numpy as np

    num_frames = options.get("num_frames", _NUM_FRAMES)
    reader = FrameReader.of(data, num_frames, limits)
    text = data[len(FRAME_LIST) :].decode("ascii", "replace")
    parts = text.split(",", num_frames)[: num_frames if num_frames > 0 else None]
    frames = np.stack([np.asarray(reader.load_base64("image/jpeg", part)) for part in parts])
    count, height, width, _ = frames.shape
    header = VideoHeader(options.get("total_num_frames", count), float(options.get("fps", 1)), width, height)
    indices = tuple(options.get("frames_indices", range(count)))
    if len(indices) != count or header.num_frames < count:
        raise InvalidRequest(MISFIT)
    limits.check_length(header.num_frames, header.duration_s)
    return Video(header, indices, frames)


@dataclass(slots=True)
class FrameReader:
    """Decodes the frames of one list, of one size, up to the limit of a video's pixels."""

    limits: DecodeLimits
    _pixels: int = 0
    _sizes: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, data: bytes, num_frames: int, limits: DecodeLimits) -> FrameReader:
        """Return the reader of a list's first `num_frames`, or of all if that is -1; too many are refused."""
        count = count_frames(data) if num_frames < 0 else min(count_frames(data), num_frames)
        if count > (most := min(limits.max_video_frames, MAX_FRAMES)):  # nobody has counted further than that
            raise MediaTooLarge(f"the list has {count:,} frames; the limit is {most:,} (--max-video-frames)")
        return cls(limits)

    def load_base64(self, media_type: str, data: str) -> Image.Image:
        """Return the next frame; the name is that of vLLM's loaders of images."""
        import pybase64

        del media_type
        number = len(self._sizes)
        try:
            encoded = pybase64.b64decode(data, validate=True)
        except ValueError:
            raise MediaError(f"frame {number} of the list is not valid base64") from None
        if (size := size_from_header(encoded, self.limits)) is not None:
            self._charge(size)
        try:
            image = decode_image(encoded, self.limits)
        except MediaError as error:
            raise type(error)(f"frame {number} of the list: {error}") from None
        if size is None:
            self._charge(image.size)
        self._sizes.append(image.size)
        if image.size != (first := self._sizes[0]):
            raise MediaUndecodable(
                f"frame {number} of the list is {image.width}×{image.height}, the first one {first[0]}×{first[1]}; "
                "send frames of one size"
            )
        return image

    def _charge(self, size: tuple[int, int]) -> None:
        self._pixels += size[0] * size[1]
        if self._pixels > self.limits.max_video_pixels:
            raise MediaTooLarge(
                f"the list's frames have more pixels than the limit of {self.limits.max_video_pixels:,} "
                "(--max-video-pixels): send fewer or smaller ones"
            )
