"""S13: what the model sees is what a person sees. The table of docs/api/media.md, row by row.

The control is what most servers do: `Image.open(...).convert("RGB")`, FFmpeg's own mixing, frames as they are stored.
"""

from __future__ import annotations

import io
import struct
import zlib

import av
import numpy as np
import pytest
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from semel.errors import MediaUndecodable
from semel.media import DecodeLimits, decode_audio, decode_image, decode_video
from tests.security.corpus import encode_clip, encode_image, encode_video

LIMITS = DecodeLimits()
WHITE = (255, 255, 255)
ONE = 1 << 16


def naive_image(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def corner(image: Image.Image) -> tuple[int, ...]:
    pixel = image.getpixel((0, 0))
    assert isinstance(pixel, tuple)
    return pixel


def png(depth: int, colour: int, row: bytes, *, before: bytes = b"", after: bytes = b"") -> bytes:
    """A PNG of 4×4 pixels, row by row; `before` and `after` its pixels there are chunks."""
    head = struct.pack(">IIBBBBB", 4, 4, depth, colour, 0, 0, 0)
    pixels = zlib.compress((b"\x00" + row) * 4)
    chunks = chunk(b"IHDR", head) + before + chunk(b"IDAT", pixels) + after + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def oriented(tag: int, kind: str) -> tuple[bytes, np.ndarray]:
    """A file that is to be shown turned, and how it is to be shown."""
    stored = np.arange(6, dtype=np.uint8).reshape(2, 3).repeat(16, axis=0).repeat(16, axis=1) * 40
    exif = Image.Exif()
    exif[0x0112] = tag
    options: dict[str, object] = {"lossless": True} if kind == "WEBP" else {}
    if kind == "JPEG":
        options = {"quality": 100}
    shown = {
        1: stored,
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.T,
        6: np.rot90(stored, -1),
        7: stored[::-1, ::-1].T,
        8: np.rot90(stored),
    }[tag]
    return encode_image(Image.fromarray(stored).convert("RGB"), kind, exif=exif, **options), shown


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("tag", range(1, 9))
def test_all_eight_orientations_are_applied_S13(tag: int, kind: str) -> None:
    """CVE-2026-12491."""
    data, shown = oriented(tag, kind)
    ours = np.asarray(decode_image(data, LIMITS))[..., 0].astype(int)
    assert ours.shape == shown.shape
    assert np.abs(ours - shown).max() <= 2
    if tag > 1 and kind != "TIFF":  # Pillow itself turns TIFF
        naive = np.asarray(naive_image(data))[..., 0].astype(int)
        assert naive.shape != shown.shape or np.abs(naive - shown).max() > 2


XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


def sideways(kind: str, exif: Image.Exif | None = None) -> bytes:
    """An image of 16×32 pixels whose XMP says that it lies on its side."""
    image = Image.linear_gradient("L").resize((16, 32)).convert("RGB")
    options: dict[str, object] = {"xmp": XMP}
    if kind == "PNG":
        options = {"pnginfo": PngInfo()}
        options["pnginfo"].add_itxt("XML:com.adobe.xmp", XMP.decode())  # type: ignore[attr-defined]
    elif kind == "TIFF":
        options = {"tiffinfo": {700: XMP}}
    return encode_image(image, kind, **options, **({} if exif is None else {"exif": exif}))


def naive_upright(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return ImageOps.exif_transpose(image)


@pytest.mark.parametrize("kind", ["JPEG", "MPO", "PNG", "TIFF", "WEBP"])
def test_an_orientation_that_only_XMP_tells_is_not_applied_as_in_viewers_S13(kind: str) -> None:
    data = sideways(kind)
    assert decode_image(data, LIMITS).size == (16, 32)
    if kind != "MPO":  # its writer leaves XMP out
        assert naive_upright(data).size == (32, 16)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_EXIF_counts_beside_XMP_and_XMP_does_not_count_beside_EXIF_S13(kind: str) -> None:
    """Pillow reads both when it opens a JPEG, in search of its resolution, and remembers what XMP says."""
    exif = Image.Exif()
    exif[0x0131] = "a camera"
    assert decode_image(sideways(kind, exif), LIMITS).size == (16, 32)
    assert naive_upright(sideways(kind, exif)).size == (32, 16)
    exif[0x0112] = 3
    turned_over = decode_image(sideways(kind, exif), LIMITS)
    assert turned_over.size == (16, 32)
    assert corner(turned_over)[0] > 200, "the gradient begins black"
    exif[0x0112] = 8
    assert decode_image(sideways(kind, exif), LIMITS).size == (32, 16)


@pytest.mark.parametrize("behind_the_pixels", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        b"XML:com.adobe.xmp\x00" + XMP,
        b"Raw profile type exif\x00\nexif\n      26\n" + b"4d4d002a000000080001011200030000000100060000" + b"00000000",
        b"Raw profile type exif\x00\nexif\n       9\nno digits",
    ],
)
def test_an_orientation_in_the_text_of_a_PNG_is_not_applied_as_in_browsers_S13(
    text: bytes, behind_the_pixels: bool
) -> None:
    note = chunk(b"tEXt", text)
    row = b"\x00\x40\x80\xff"
    data = png(8, 0, row, after=note) if behind_the_pixels else png(8, 0, row, before=note)
    shown = decode_image(data, LIMITS)
    assert [shown.getpixel((x, 0)) for x in range(4)] == [(level,) * 3 for level in row]
    if not text.endswith(b"no digits"):
        naive = naive_upright(data)
        assert [naive.getpixel((x, 0)) for x in range(4)] == [0] * 4


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_EXIF_that_is_damaged_turns_nothing_and_costs_nothing_S13(kind: str) -> None:
    image = Image.linear_gradient("L").resize((16, 32)).convert("RGB")
    assert decode_image(encode_image(image, kind, exif=b"Exif\x00\x00no EXIF"), LIMITS).size == (16, 32)


@pytest.mark.parametrize(
    ("name", "depth", "colour", "row", "transparent"),
    [
        ("1 bit", 1, 0, b"\x00", b"\x00\x00"),
        ("2 bits", 2, 0, b"\x55", b"\x00\x01"),
        ("4 bits", 4, 0, b"\x88\x88", b"\x00\x08"),
        ("8 bits", 8, 0, b"\x44" * 4, b"\x00\x44"),
        ("16 bits", 16, 0, b"\x12\x34" * 4, b"\x12\x34"),
        ("RGB of 8 bits", 8, 2, b"\x01\x02\x03" * 4, b"\x00\x01\x00\x02\x00\x03"),
        ("RGB of 16 bits", 16, 2, b"\x12\x34" * 12, b"\x12\x34" * 3),
    ],
)
def test_a_colour_that_tRNS_makes_transparent_is_white_at_every_depth_S13(
    name: str, depth: int, colour: int, row: bytes, transparent: bytes
) -> None:
    """CVE-2026-12491. What a person does not see must not be what the model reads."""
    data = png(depth, colour, row, before=chunk(b"tRNS", transparent))
    assert corner(decode_image(data, LIMITS)) == WHITE
    if name != "16 bits":  # there the control is white for another reason: see the test of 16 bits
        assert corner(naive_image(data)) != WHITE


def test_an_index_that_tRNS_makes_transparent_is_white_S13() -> None:
    palette = chunk(b"PLTE", bytes((10, 20, 30, 40, 50, 60)))
    data = png(8, 3, b"\x00\x01\x00\x01", before=palette + chunk(b"tRNS", b"\x00\xff"))
    image = decode_image(data, LIMITS)
    assert [image.getpixel((x, 0)) for x in (0, 1)] == [WHITE, (40, 50, 60)]
    assert corner(naive_image(data)) == (10, 20, 30)


def test_tRNS_behind_the_pixels_counts_for_nothing_as_in_browsers_S13() -> None:
    data = png(8, 2, b"\x01\x02\x03" * 4, after=chunk(b"tRNS", b"\x00\x01\x00\x02\x00\x03"))
    assert corner(decode_image(data, LIMITS)) == (1, 2, 3)


@pytest.mark.parametrize(("mode", "kind"), [("RGBA", "PNG"), ("LA", "PNG"), ("RGBA", "WEBP"), ("RGBA", "TIFF")])
def test_what_is_transparent_is_white_and_half_of_it_half_white_S13(mode: str, kind: str) -> None:
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    for alpha, expected in ((0, 255), (128, 127), (255, 0)):
        data = encode_image(Image.new("RGBA", (4, 4), (0, 0, 0, alpha)).convert(mode), kind, **options)
        assert corner(decode_image(data, LIMITS)) == (expected,) * 3
        assert corner(naive_image(data)) == (0, 0, 0)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_become_the_upper_eight_S13(kind: str) -> None:
    data = encode_image(Image.fromarray(np.full((4, 4), 0x4080, np.uint16)), kind)
    assert corner(decode_image(data, LIMITS)) == (0x40,) * 3
    assert corner(naive_image(data)) == WHITE


@pytest.mark.parametrize("mode", ["I", "F"])
def test_samples_of_32_bits_which_every_viewer_shows_differently_are_refused_S13(mode: str) -> None:
    with pytest.raises(MediaUndecodable, match="32 bits"):
        decode_image(encode_image(Image.new(mode, (4, 4), 70_000), "TIFF"), LIMITS)


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_inks_become_the_colours_that_they_print_S13(kind: str) -> None:
    """Adobe's JPEG has its inks inverted, TIFF has not."""
    cyan = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    red, green, blue = corner(decode_image(encode_image(cyan, kind), LIMITS))
    assert red < 10
    assert min(green, blue) > 245


def test_a_colour_profile_is_left_alone_S13() -> None:
    from PIL import ImageCms

    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    image = Image.new("RGB", (4, 4), (10, 200, 30))
    assert corner(decode_image(encode_image(image, icc_profile=profile), LIMITS)) == (10, 200, 30)


def test_a_palette_is_looked_up_S13() -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 9, 8, 7])
    assert corner(decode_image(encode_image(image), LIMITS)) == (9, 8, 7)


@pytest.mark.parametrize("kind", ["GIF", "MPO", "PNG", "TIFF", "WEBP"])
def test_of_many_pictures_the_first_is_seen_S13(kind: str) -> None:
    red, blue = (Image.new("RGB", (16, 16), colour) for colour in ("red", "blue"))
    data = encode_image(red, kind, save_all=True, append_images=[blue])
    red_value, _, blue_value = decode_image(data, LIMITS).getpixel((8, 8))  # type: ignore[misc]
    assert red_value > 200 > 50 > blue_value


def test_every_channel_is_heard_alike_S13() -> None:
    """CVE-2026-34760. FFmpeg's own mix leaves the sixth of six channels out."""
    voices = np.zeros((6, 16_000), np.float32)
    voices[3] = 0.6 * np.sin(np.arange(16_000) / 5)
    data = surround(voices)
    ours = decode_audio(data, LIMITS, sampling_rate=16_000)
    assert np.allclose(ours, voices.mean(axis=0), atol=1e-4)
    assert np.abs(naive_mono(data)).max() < 1e-3


def surround(samples: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="wav") as file:
        stream = file.add_stream("pcm_f32le", rate=16_000, layout="5.1")
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="5.1")
        frame.sample_rate = 16_000
        for packet in (*stream.encode(frame), *stream.encode(None)):
            file.mux(packet)
    return buffer.getvalue()


def naive_mono(data: bytes) -> np.ndarray:
    with av.open(io.BytesIO(data)) as file:
        to_mono = av.AudioResampler(format="fltp", layout="mono", rate=16_000)
        return np.concatenate(
            [part.to_ndarray()[0] for frame in file.decode(audio=0) for part in to_mono.resample(frame)]
        )


def test_opposite_channels_cancel_as_their_mean_does_S13() -> None:
    tone = 0.5 * np.sin(np.arange(8_000) / 3)
    samples = decode_audio(encode_clip(np.stack([tone, -tone]), "wav", "pcm_f32le"), LIMITS, sampling_rate=16_000)
    assert np.abs(samples).max() < 1e-6


def turned(matrix: tuple[int, int, int, int]) -> tuple[bytes, np.ndarray]:
    """A video with another display matrix, and its first frame as it is stored."""
    rng = np.random.default_rng(2)
    blocks = rng.integers(0, 256, (3, 2, 3, 3), dtype=np.uint8).repeat(32, axis=1).repeat(32, axis=2)
    data = bytearray(encode_video(blocks))
    a, b, c, d = (value * ONE for value in matrix)
    start = data.index(b"tkhd") + 44
    data[start : start + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    with av.open(io.BytesIO(bytes(data))) as file:
        stored = next(iter(file.decode(video=0))).to_ndarray(format="rgb24")
    return bytes(data), stored


@pytest.mark.parametrize(
    ("matrix", "turn"),
    [
        ((1, 0, 0, 1), lambda frame: frame),
        ((0, 1, -1, 0), lambda frame: np.rot90(frame, -1)),
        ((-1, 0, 0, -1), lambda frame: np.rot90(frame, 2)),
        ((0, -1, 1, 0), lambda frame: np.rot90(frame, 1)),
        ((-1, 0, 0, 1), lambda frame: frame[:, ::-1]),
        ((1, 0, 0, -1), lambda frame: frame[::-1]),
        ((0, 1, 1, 0), lambda frame: frame.swapaxes(0, 1)),
        ((0, -1, -1, 0), lambda frame: frame[::-1, ::-1].swapaxes(0, 1)),
    ],
)
def test_a_video_is_shown_as_its_display_matrix_says_S13(matrix: tuple[int, int, int, int], turn: object) -> None:
    data, stored = turned(matrix)
    shown = decode_video(data, LIMITS, choose=lambda _: [0]).frames[0]
    assert callable(turn)
    assert np.array_equal(shown, turn(stored))
    if matrix != (1, 0, 0, 1):
        assert shown.shape != stored.shape or not np.array_equal(shown, stored)


def test_frames_come_in_the_order_in_which_they_are_shown_S13() -> None:
    """Not in that in which they are stored: encoders put what later frames refer to first."""
    levels = np.arange(12, dtype=np.uint8) * 20
    frames = levels[:, None, None, None].repeat(32, 1).repeat(32, 2).repeat(3, 3)
    video = decode_video(encode_video(frames), LIMITS, choose=lambda header: range(header.num_frames))
    assert np.all(np.diff(video.frames.mean(axis=(1, 2, 3))) > 10)


def test_words_in_no_known_script_beside_the_media_do_no_harm_S13() -> None:
    data = encode_clip(np.zeros((1, 1_600)), "wav", "pcm_s16le")
    words = b"INFOINAM\x04\x00\x00\x00\xe9\xe8\xff\x00"
    noted = data[:12] + b"LIST" + struct.pack("<I", len(words)) + words + data[12:]
    noted = noted[:4] + struct.pack("<I", len(noted) - 8) + noted[8:]
    assert decode_audio(noted, LIMITS, sampling_rate=16_000).size == 1_600
    with pytest.raises(UnicodeDecodeError):
        av.open(io.BytesIO(noted)).close()
