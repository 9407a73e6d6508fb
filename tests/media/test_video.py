"""Videos: the frames that are asked for and no others, and files that are not what they say."""

from __future__ import annotations

import io
from fractions import Fraction

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.errors import MediaDegenerate, MediaError, MediaTooLarge, MediaUndecodable
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


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (DecodeLimits(max_image_pixels=64 * 48 - 1), "64×48"),
        (DecodeLimits(max_video_s=1.9), r"limit of 1\.9 s"),
        (DecodeLimits(max_video_pixels=64 * 48 * FRAMES - 1), "12 frames"),
    ],
)
def test_a_video_over_a_limit_is_refused_before_it_is_decoded_S5(
    data: bytes, limits: DecodeLimits, message: str
) -> None:
    with pytest.raises(MediaTooLarge, match=message):
        decode_video(data, limits, choose=all_frames)


@pytest.mark.parametrize("broken", [b"", b"GIF89a", b"#EXTM3U\nhttp://127.0.0.1/x.ts\n", film()[:400]])
def test_what_is_no_video_is_refused_in_our_words_S6_S7(broken: bytes) -> None:
    with pytest.raises(MediaUndecodable, match="does not decode"):
        decode_video(broken, LIMITS, choose=all_frames)


@settings(max_examples=examples(60), deadline=None)
@given(position=st.integers(0, 10_000), value=st.integers(0, 255))
def test_a_damaged_byte_gives_a_video_or_a_refusal(data: bytes, position: int, value: int) -> None:
    damaged = bytearray(data)
    damaged[position % len(damaged)] = value
    limits = DecodeLimits(max_video_pixels=64 * 48 * 100, max_video_s=60)
    try:
        video = decode_video(bytes(damaged), limits, choose=lambda header: range(min(header.num_frames, 20)))
    except MediaError:
        return
    assert 0 < len(video.frames) == len(video.indices) <= 20
