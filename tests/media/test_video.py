"""Videos: the frames that are asked for and no others, and files that are not what they say."""

from __future__ import annotations

import io
from fractions import Fraction

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.errors import MediaDegenerate, MediaUndecodable
from semel.media import DecodeLimits, VideoHeader, decode_video
from tests.effort import examples

LIMITS = DecodeLimits()
FRAMES = 12


def film(frames: int = FRAMES, *, width: int = 64, height: int = 48, fps: int = 6) -> bytes:
    """Frames that get brighter one by one."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=Fraction(fps))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            grey = np.full((height, width, 3), 10 + 15 * number, np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        file.mux(stream.encode())
    return buffer.getvalue()


@pytest.fixture(scope="module")
def data() -> bytes:
    return film()


def all_frames(header: VideoHeader) -> range:
    return range(header.num_frames)


def test_the_header_tells_size_rate_and_length(data: bytes) -> None:
    header = decode_video(data, LIMITS, choose=lambda _: [0]).header
    assert header == VideoHeader(FRAMES, 6.0, 64, 48)
    assert header.duration_s == 2.0


@settings(max_examples=examples(30), deadline=None)
@given(wanted=st.lists(st.integers(0, FRAMES - 1), min_size=1, max_size=20).map(sorted))
def test_frames_are_those_that_were_wanted_in_order(data: bytes, wanted: list[int]) -> None:
    everything = decode_video(data, LIMITS, choose=all_frames).frames
    chosen = decode_video(data, LIMITS, choose=lambda _: wanted)
    assert chosen.frames.shape == (len(wanted), 48, 64, 3)
    assert np.array_equal(chosen.frames, everything[wanted])
    assert chosen.indices == tuple(wanted)


def test_frames_that_the_file_promises_and_lacks_are_left_out(data: bytes) -> None:
    video = decode_video(data, LIMITS, choose=lambda header: [0, header.num_frames + 5])
    assert len(video.frames) == len(video.indices) == 1
    with pytest.raises(MediaDegenerate, match="none of the frames"):
        decode_video(data, LIMITS, choose=lambda header: [header.num_frames + 5])


@pytest.mark.parametrize("broken", [b"", b"GIF89a", b"#EXTM3U\nhttp://127.0.0.1/x.ts\n", film()[:400]])
def test_what_is_no_video_is_refused_in_our_words_S6_S7(broken: bytes) -> None:
    with pytest.raises(MediaUndecodable, match="does not decode"):
        decode_video(broken, LIMITS, choose=all_frames)
