"""The video decoder on any bytes."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Final

import av
import numpy as np
from PIL import Image

from semel.errors import RequestError
from semel.media import FRAME_LIST, DecodeLimits, VideoHeader, decode_frames, decode_video
from tools.fuzz.oracle import check_decoders_message, expect

_LIMITS: Final = DecodeLimits(max_image_pixels=1 << 16, max_video_s=20.0, max_video_pixels=1 << 18)
_MAX_FRAMES: Final = 4


def run(data: bytes) -> None:
    """Whatever the bytes, there are the frames that were wanted, or an error of the client's."""
    try:
        if data.startswith(FRAME_LIST):
            video = decode_frames(data, _LIMITS, {"num_frames": _MAX_FRAMES})
        else:
            video = decode_video(data, _LIMITS, choose=_spread)
    except RequestError as error:
        check_decoders_message(error)
        return
    except av.error.MemoryError:
        return  # FFmpeg's word for a size that it refuses; a pool process answers it with 413
    frames = video.frames
    expect(frames.dtype == np.uint8 and frames.ndim == 4 and frames.shape[3] == 3, f"{frames.shape} is not RGB (S13)")
    expect(1 <= len(frames) <= _MAX_FRAMES and len(frames) == len(video.indices), f"{len(frames)} frames (S8)")
    expect([*video.indices] == sorted(video.indices), f"frames in the order {video.indices}")
    expect(min(frames.shape[1:3]) >= _LIMITS.min_image_side, f"{frames.shape} is too small (S8)")
    expect(frames.shape[1] * frames.shape[2] <= _LIMITS.max_image_pixels, f"{frames.shape} is too large (S5)")


def _spread(header: VideoHeader) -> Sequence[int]:
    """A few frames from the first to the last, as models choose them."""
    return sorted({round(at) for at in np.linspace(0, header.num_frames - 1, _MAX_FRAMES)})


def seeds() -> Mapping[str, bytes]:
    """A few small frames in every accepted container."""
    return {
        "avi": _film("avi", "mpeg4"),
        "matroska": _film("matroska", "libx264"),
        "mov": _film("mov", "mjpeg", pixels="yuvj420p"),
        "mp4": _film("mp4", "mpeg4"),
        "mp4-h264": _film("mp4", "libx264"),
        "list": FRAME_LIST + b",".join([_jpeg()] * 3),
        "mpeg": _film("mpeg", "mpeg2video", rate=25),
        "webm": _film("webm", "libvpx"),
        "webm-vp9": _film("webm", "libvpx-vp9"),
    }


def _jpeg() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16), (60, 120, 180)).save(buffer, "JPEG")
    return base64.b64encode(buffer.getvalue())


def _film(format_: str, codec: str, *, pixels: str = "yuv420p", rate: int = 5) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=format_) as file:
        stream = file.add_stream(codec, rate=Fraction(rate))
        stream.width, stream.height, stream.pix_fmt = 16, 16, pixels
        stream.codec_context.thread_count = 1
        for number in range(3):
            grey = np.full((16, 16, 3), 60 * number, np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        file.mux(stream.encode())
    return buffer.getvalue()
