"""S5: few bytes that are much: pixels, frames, scans, text, seconds, samples, channels.

Every attack has its control: a decoder without our limits, in a process of little memory, runs out of it or works for
long on the same file.
"""

from __future__ import annotations

import io
import struct
import time
import zlib
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from PIL import GifImagePlugin, Image, ImageSequence, MpoImagePlugin, PngImagePlugin, TiffImagePlugin, WebPImagePlugin

from semel.errors import MediaDegenerate, MediaError, MediaTooLarge
from semel.media import DecodeLimits, decode_audio, decode_image, decode_video
from semel.media.decode import image as image_module
from semel.media.decode import video
from tests.security.confined import confined
from tests.security.corpus import encode_image, encode_video

LIMITS = DecodeLimits()
NAIVE_IMAGE = """
Image.MAX_IMAGE_PIXELS = None
Image.open(io.BytesIO(data)).convert("RGB")
"""
NAIVE_CANVAS = """
Image.MAX_IMAGE_PIXELS = None
try:
    Image.open(io.BytesIO(data))
except OSError as error:
    raise MemoryError(error)  # all that its decoder says
"""
NAIVE_FRAMES = """
kept = [frame.convert("RGB") for frame in ImageSequence.Iterator(Image.open(io.BytesIO(data)))]
"""
NAIVE_TEXT = """
PngImagePlugin.MAX_TEXT_MEMORY = PngImagePlugin.MAX_TEXT_CHUNK = 1 << 40
Image.open(io.BytesIO(data)).load()
"""
NAIVE_CLIP = """
with av.open(io.BytesIO(data)) as file:
    to_rate = av.AudioResampler(format="fltp", layout="mono", rate=16_000)
    kept = [part.to_ndarray() for frame in file.decode(audio=0) for part in to_rate.resample(frame)]
    np.concatenate(kept, axis=1)
"""
OUR_IMAGE = "decode_image(data, DecodeLimits())"
OUR_CLIP = "decode_audio(data, DecodeLimits(max_audio_s=60), sampling_rate=16_000)"


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def huge_png(side: int) -> bytes:
    """A small PNG whose header says that it is huge."""
    small = encode_image(Image.new("1", (16, 16)))
    return small[:8] + png_chunk(b"IHDR", struct.pack(">II", side, side) + small[24:29]) + small[33:]


def huge_tiff(side: int) -> bytes:
    """A small TIFF whose tags of width and height, 256 and 257, say that it is huge."""
    small = bytearray(encode_image(Image.new("1", (16, 16)), "TIFF", compression="tiff_adobe_deflate"))
    (place,) = struct.unpack_from("<I", small, 4)
    (count,) = struct.unpack_from("<H", small, place)
    for entry in range(place + 2, place + 2 + 12 * count, 12):
        if struct.unpack_from("<H", small, entry)[0] in (256, 257):
            struct.pack_into("<HII", small, entry + 2, 4, 1, side)  # one number of 32 bits
    return bytes(small)


def frame_flood(frames: int, side: int = 1_000) -> bytes:
    """A GIF that says the same blank frame again and again."""
    one = encode_image(Image.new("P", (side, side)), "GIF")
    start = one.index(b"\x2c")  # the first frame; before it are the screen and its colours
    return one[:start] + one[start:-1] * frames + b";"


def text_bomb(chunks: int) -> bytes:
    """A PNG with a MiB of text in every KiB of it."""
    whole = encode_image(Image.new("RGB", (8, 8)))
    text = zlib.compress(bytes(1 << 20), 9)
    pieces = [png_chunk(b"zTXt", b"%d\x00\x00" % number + text) for number in range(chunks)]
    return whole[:33] + b"".join(pieces) + whole[33:]


def many_scans(scans: int) -> bytes:
    """A progressive JPEG that goes over its pixels again and again."""
    one = encode_image(Image.new("L", (1_024, 1_024)), "JPEG", progressive=True)
    last = one.rindex(b"\xff\xda")
    return one[:last] + one[last:-2] * scans + b"\xff\xd9"


def hours_of_silence(hours: int) -> bytes:
    """Opus packets of six frames of silence each, in a file that does not tell its length."""
    packet = bytes([(31 << 3) | 3, 6]) + b"\xff\xfe" * 6  # 20 ms, CELT; six frames of equal size
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska", options={"live": "1"}) as file:
        stream = file.add_stream("libopus", rate=48_000, layout="mono")
        for number in range(hours * 30_000):
            piece = av.Packet(packet)
            piece.stream, piece.time_base = stream, Fraction(1, 48_000)
            piece.pts = piece.dts = number * 5_760
            file.mux(piece)
    return buffer.getvalue()


def wav(rate: int, channels: int = 1, samples: int = 4_000) -> bytes:
    body = bytes(2 * samples)
    form = struct.pack("<HHIIHH", 1, channels, rate, min(rate * 2, 0xFFFFFFFF), 2 * channels & 0xFFFF, 16)
    chunks = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", len(chunks)) + chunks


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_pixels_are_refused_by_the_header_before_they_are_allocated_S5(kind: str) -> None:
    bomb = huge_png(20_000) if kind == "PNG" else huge_tiff(20_000)
    ours = confined(OUR_IMAGE, bomb)
    assert ours.said == "MediaTooLarge"
    assert ours.grown_bytes < 16 << 20
    assert confined(NAIVE_IMAGE, bomb).said == "MemoryError"


def test_a_canvas_that_is_allocated_when_it_is_opened_is_refused_before_S5() -> None:
    small = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    bomb = bytearray(encode_image(small[0], "WEBP", save_all=True, append_images=small[1:]))
    assert bomb[12:16] == b"VP8X"
    bomb[24:30] = (16_383 - 1).to_bytes(3, "little") * 2
    assert confined(OUR_IMAGE, bytes(bomb)).said == "MediaTooLarge"
    assert confined(NAIVE_CANVAS, bytes(bomb)).said == "MemoryError"


@pytest.mark.parametrize("options", [{}, {"lossless": True}, {"exif": Image.Exif().tobytes()}])
def test_the_size_of_every_kind_of_webp_is_known_from_its_first_bytes(options: dict[str, Any]) -> None:
    data = encode_image(Image.new("RGB", (40, 30)), "WEBP", **options)
    assert image_module._webp_canvas(data[:30]) == (40, 30)
    with pytest.raises(MediaTooLarge, match="40×30"):
        decode_image(data[:30], DecodeLimits(max_image_pixels=1_199))


def test_a_huge_screen_with_a_tiny_frame_is_refused_S5() -> None:
    gif = bytearray(encode_image(Image.new("P", (4, 4)), "GIF"))
    gif[6:10] = b"\xff\xff\xff\xff"
    with pytest.raises(MediaTooLarge):
        decode_image(bytes(gif), LIMITS)


def test_our_limit_counts_where_it_is_higher_or_lower_than_pillow_s(monkeypatch: pytest.MonkeyPatch) -> None:
    image = encode_image(Image.new("L", (100, 100)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert decode_image(image, LIMITS).size == (100, 100)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    for limit in (9_999, 100):
        with pytest.raises(MediaTooLarge, match="--max-image-pixels"):
            decode_image(image, DecodeLimits(max_image_pixels=limit))
    assert Image.MAX_IMAGE_PIXELS is None


def test_frames_behind_the_first_take_neither_time_nor_memory_S5() -> None:
    """CVE-2026-34755."""
    flood = frame_flood(120)
    assert len(flood) < 2 << 20
    ours = confined(OUR_IMAGE, flood)
    assert ours.said == "done"
    assert ours.grown_bytes < 32 << 20
    assert confined(NAIVE_FRAMES, flood).said == "MemoryError"


@pytest.mark.parametrize(
    ("kind", "plugin"),
    [
        ("GIF", GifImagePlugin.GifImageFile),
        ("MPO", MpoImagePlugin.MpoImageFile),
        ("PNG", PngImagePlugin.PngImageFile),
        ("TIFF", TiffImagePlugin.TiffImageFile),
        ("WEBP", WebPImagePlugin.WebPImageFile),
    ],
)
def test_no_format_is_asked_for_another_frame_S5(kind: str, plugin: type, monkeypatch: pytest.MonkeyPatch) -> None:
    red, blue = (Image.new("RGB", (16, 16), colour) for colour in ("red", "blue"))
    data = encode_image(red, kind, save_all=True, append_images=[blue])

    def no_seek(self: object, frame: int) -> None:
        raise AssertionError(f"frame {frame} was asked for")

    monkeypatch.setattr(plugin, "seek", no_seek)
    red_value, _, blue_value = decode_image(data, LIMITS).getpixel((8, 8))  # type: ignore[misc]
    assert red_value > 200 > 50 > blue_value
    with pytest.raises(AssertionError, match="was asked for"):
        list(ImageSequence.Iterator(Image.open(io.BytesIO(data))))


def test_text_beside_the_pixels_is_bounded_S5() -> None:
    bomb = text_bomb(400)
    ours = confined(OUR_IMAGE, bomb)
    assert ours.said == "MediaUndecodable"
    assert ours.grown_bytes < 100 << 20
    assert confined(NAIVE_TEXT, bomb).said == "MemoryError"


@pytest.mark.alone
def test_a_jpeg_of_many_scans_is_refused_before_the_first_S5() -> None:
    bomb, plain = many_scans(400), many_scans(1)
    assert len(bomb) < 100_000

    def seconds(data: bytes, decode: Any) -> float:
        began = time.process_time()
        decode(data)
        return time.process_time() - began

    def ours(data: bytes) -> None:
        with pytest.raises(MediaTooLarge, match="more scans than the limit of 100"):
            decode_image(data, LIMITS)

    def naive(data: bytes) -> None:
        Image.open(io.BytesIO(data)).load()

    assert decode_image(plain, LIMITS).size == (1_024, 1_024)
    assert seconds(bomb, naive) > 10 * seconds(bomb, ours)


def test_markers_that_only_look_like_scans_are_not_counted() -> None:
    image = encode_image(Image.new("RGB", (16, 16)), "JPEG")
    with_film = image + b"\xff\xda\x00\x08" * 1_000  # phones append a film to a picture
    comment = b"\xff\xfe" + struct.pack(">H", 402) + b"\xff\xda" * 200
    assert decode_image(with_film, LIMITS).size == (16, 16)
    assert decode_image(image[:2] + comment + image[2:], LIMITS).size == (16, 16)


def test_hours_of_sound_in_few_bytes_are_cut_off_while_they_decode_S5() -> None:
    """CVE-2026-54233: 25 MB of Opus were 14.9 GB of samples."""
    bomb = hours_of_silence(1)
    assert len(bomb) < 4 << 20
    ours = confined(OUR_CLIP, bomb, max_bytes=64 << 20)
    assert ours.said == "MediaTooLarge"
    assert ours.grown_bytes < 24 << 20
    assert confined(NAIVE_CLIP, bomb, max_bytes=64 << 20).said == "MemoryError"


def test_few_samples_at_a_tiny_rate_are_not_resampled_into_many_S5_S8() -> None:
    with pytest.raises(MediaDegenerate, match="has 1 samples a second; it needs 1,000"):
        decode_audio(wav(1), DecodeLimits(max_audio_s=1e6), sampling_rate=16_000)
    assert confined(NAIVE_CLIP, wav(1), max_bytes=128 << 20).said == "MemoryError"


@pytest.mark.parametrize("rate", [384_001, 4_000_000_000])
def test_a_second_does_not_have_any_number_of_samples_S5(rate: int) -> None:
    with pytest.raises(MediaError):
        decode_audio(wav(rate), LIMITS, sampling_rate=16_000)


def test_channels_are_counted_before_they_are_decoded_S5() -> None:
    with pytest.raises(MediaTooLarge, match=r"has 100 channels; the limit is 64 \(--max-audio-channels\)"):
        decode_audio(wav(16_000, channels=100), LIMITS, sampling_rate=16_000)
    assert decode_audio(wav(16_000, channels=64), LIMITS, sampling_rate=16_000).size == 62


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (DecodeLimits(max_video_frames=11), r"has 12 frames; the limit is 11 \(--max-video-frames\)"),
        (DecodeLimits(max_video_s=1.5), r"limit of 1\.5 s \(--max-video-s\)"),
        (DecodeLimits(max_image_pixels=32 * 32 - 1), r"32×32, 1,024 pixels; the limit is 1,023"),
    ],
)
def test_a_video_over_a_limit_is_refused_before_its_frames_are_chosen_S5(limits: DecodeLimits, message: str) -> None:
    data = encode_video(np.zeros((12, 32, 32, 3), np.uint8))

    def choose(header: video.VideoHeader) -> list[int]:
        raise AssertionError("nothing is chosen of it")

    with pytest.raises(MediaTooLarge, match=message):
        decode_video(data, limits, choose=choose)


def test_packets_without_frames_come_to_an_end_S5() -> None:
    """CVE-2026-5497. A file is a few bytes a packet; none of these gives a frame."""
    read = 0

    class Packet:
        def decode(self) -> list[object]:
            return []

    class Container:
        streams: Any = type("Streams", (), {"video": [None]})

        def demux(self, _: object) -> Iterator[Packet]:
            nonlocal read
            for _ in range(1_000_000):
                read += 1
                yield Packet()

    with pytest.raises(MediaTooLarge, match="over 84 packets up to its frame 10"):
        list(video._decode(Container(), 10))
    assert read < 100
