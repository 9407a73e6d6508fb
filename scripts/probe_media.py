"""Makes the media of the probes: `python scripts/probe_media.py` writes src/semel/processing/probes/media.tar.xz.

Frontends and workers decode these files and compare what comes out, so the bytes are shipped: an encoder of another
version would write others. Run it only to add probes; what each of them decodes to changes with it, and so does every
fingerprint. Needs the versions of containers/versions.txt.
"""

from __future__ import annotations

import io
import itertools
import lzma
import struct
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import av
import numpy as np
from PIL import Image

OUTPUT: Final = Path(__file__).parent.parent / "src" / "semel" / "processing" / "probes" / "media.tar.xz"
WIDTH: Final = 23
HEIGHT: Final = 17
"""Of an image: odd, and no multiple of a block, so that edges count."""

Probe = tuple[str, bytes]


def pixels(channels: int, *, seed: int = 1, width: int = WIDTH, height: int = HEIGHT) -> np.ndarray:
    """A gradient with noise and an edge: smooth and rough parts, the ends of the range, every channel different."""
    y, x = np.mgrid[0:height, 0:width]
    noise = np.random.default_rng(seed).integers(0, 64, (height, width, channels))
    ramp = np.stack([(x * (3 + c) * 3 + y * (7 - c) * 2 + 40 * c) % 256 for c in range(channels)], axis=-1)
    mixed = np.where((x > width // 2)[..., None], ramp, ramp // 2 + noise)
    mixed[0, 0], mixed[-1, -1] = 0, 255
    return mixed.astype(np.uint8)


def picture(mode: str) -> Image.Image:
    """A small picture of one of Pillow's modes."""
    if mode == "1":
        return Image.fromarray(pixels(1)[..., 0]).convert("1")
    if mode == "L":
        return Image.fromarray(pixels(1)[..., 0])
    if mode == "LA":
        return Image.merge("LA", [Image.fromarray(pixels(2)[..., c]) for c in range(2)])
    if mode == "P":
        return Image.fromarray(pixels(3)).quantize(64)
    if mode == "I;16":
        return Image.fromarray(pixels(1)[..., 0].astype(np.uint16) * 257 + 3)
    if mode in ("YCbCr", "LAB"):
        return Image.merge(mode, [Image.fromarray(pixels(3)[..., c]) for c in range(3)])
    if mode in ("CMYK", "RGBA"):
        return Image.merge(mode, [Image.fromarray(pixels(4)[..., c]) for c in range(4)])
    return Image.fromarray(pixels(3))


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def exif(orientation: int) -> bytes:
    """An EXIF block with an orientation alone."""
    return b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01" + struct.pack(">HHI", orientation, 0, 0)


def jpegs() -> Iterator[Probe]:
    """Modes, qualities, subsampling, scans, restart markers, orientations."""
    for mode, quality, progressive in itertools.product(("L", "RGB", "CMYK"), (30, 75, 95), (False, True)):
        kind = "progressive" if progressive else "baseline"
        for subsampling in ("4:4:4", "4:2:2", "4:2:0") if mode != "L" else ("4:4:4",):
            name = f"jpeg {mode} {kind} quality {quality}" + (f" {subsampling}" if mode != "L" else "")
            options = {"subsampling": subsampling} if mode != "L" else {}
            yield name, saved(picture(mode), "JPEG", quality=quality, progressive=progressive, **options)
    for mode, orientation in itertools.product(("L", "RGB", "CMYK"), range(1, 9)):
        yield f"jpeg {mode} orientation {orientation}", saved(picture(mode), "JPEG", exif=exif(orientation))
    for blocks in (1, 2):
        yield f"jpeg RGB restart every {blocks}", saved(picture("RGB"), "JPEG", restart_marker_blocks=blocks)
    yield "jpeg RGB kept as RGB", saved(picture("RGB"), "JPEG", keep_rgb=True)
    sides = ((8, 8), (16, 16), (7, 31), (31, 7), (64, 48))
    for (width, height), subsampling in itertools.product(sides, ("4:4:4", "4:2:2", "4:2:0")):
        image = Image.fromarray(pixels(3, width=width, height=height))
        yield f"jpeg RGB {width}x{height} {subsampling}", saved(image, "JPEG", subsampling=subsampling)


# PNG, written here: Pillow writes neither all depths nor interlaced files.
_PASSES: Final = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
_CHANNELS: Final = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_COLOURS: Final = {0: "grey", 2: "RGB", 3: "palette", 4: "grey with alpha", 6: "RGBA"}
_DEPTHS: Final = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _png_rows(samples: np.ndarray, depth: int, row_filter: int) -> bytes:
    """Rows of samples, packed and filtered."""
    if depth == 16:
        rows = [row.astype(">u2").tobytes() for row in samples]
    elif depth == 8:
        rows = [row.astype(np.uint8).tobytes() for row in samples]
    else:
        bits = [np.unpackbits(row.astype(np.uint8)[..., None], axis=-1)[..., 8 - depth :].ravel() for row in samples]
        rows = [np.packbits(row).tobytes() for row in bits]
    step, before, packed = max(1, samples.shape[-1] * depth // 8), b"", bytearray()
    for row in rows:
        above = before or bytes(len(row))
        packed.append(row_filter)
        for index, value in enumerate(row):
            left = row[index - step] if index >= step else 0
            corner = above[index - step] if index >= step else 0
            guess = (0, left, above[index], (left + above[index]) // 2, _paeth(left, above[index], corner))[row_filter]
            packed.append((value - guess) % 256)
        before = row
    return bytes(packed)


def _paeth(left: int, above: int, corner: int) -> int:
    estimate = left + above - corner
    return min((left, above, corner), key=lambda value: abs(estimate - value))


def png(
    colour: int, depth: int, *, interlaced: bool = False, row_filter: int = 0, extra: tuple[bytes, ...] = ()
) -> bytes:
    scaled = pixels(_CHANNELS[colour]).astype(np.uint32)
    samples = scaled * 257 + 5 if depth == 16 else scaled >> (8 - depth)
    samples = np.minimum(samples, (1 << depth) - 1)
    head = struct.pack(">IIBBBBB", WIDTH, HEIGHT, depth, colour, 0, 0, interlaced)
    parts = [_chunk(b"IHDR", head)]
    if colour == 3:
        parts.append(_chunk(b"PLTE", bytes((7 * n + 60 * c) % 256 for n in range(1 << depth) for c in range(3))))
    parts += extra
    if interlaced:
        passes = [samples[y::rows, x::columns] for x, y, columns, rows in _PASSES]
        body = b"".join(_png_rows(part, depth, row_filter) for part in passes if part.size)
    else:
        body = _png_rows(samples, depth, row_filter)
    return b"\x89PNG\r\n\x1a\n" + b"".join([*parts, _chunk(b"IDAT", zlib.compress(body)), _chunk(b"IEND", b"")])


def pngs() -> Iterator[Probe]:
    """Every colour type and depth, interlaced and not, transparent colours, filters, orientations, gamma."""
    for colour, depths in _DEPTHS.items():
        for depth, interlaced in itertools.product(depths, (False, True)):
            name = f"png {_COLOURS[colour]} {depth} bits" + (" interlaced" if interlaced else "")
            yield name, png(colour, depth, interlaced=interlaced)
            if colour in (0, 2, 3):
                value = 0 if depth < 16 else 5
                entry = {0: struct.pack(">H", value), 2: struct.pack(">HHH", value, value, value), 3: bytes((0, 128))}
                shown = png(colour, depth, interlaced=interlaced, extra=(_chunk(b"tRNS", entry[colour]),))
                yield f"{name} with a transparent colour", shown
    for colour, depth, row_filter in itertools.product((0, 2, 6), (8, 16), range(1, 5)):
        kind = ("none", "sub", "up", "average", "Paeth")[row_filter]
        yield f"png {_COLOURS[colour]} {depth} bits filter {kind}", png(colour, depth, row_filter=row_filter)
    for orientation in range(1, 9):
        block = _chunk(b"eXIf", exif(orientation)[6:])
        yield f"png RGB orientation {orientation}", png(2, 8, extra=(block,))
    yield "png RGB with a gamma", png(2, 8, extra=(_chunk(b"gAMA", struct.pack(">I", 100_000)),))


def gifs() -> Iterator[Probe]:
    """Sizes of palettes, rows in their order or not, a transparent colour, frames after the first."""
    for colours, interlace, transparent in itertools.product((2, 4, 16, 64, 256), (0, 1), (False, True)):
        image = Image.fromarray(pixels(3)).quantize(colours)
        options: dict[str, Any] = {"transparency": 1} if transparent else {}
        name = f"gif {colours} colours" + (" interlaced" if interlace else "") + (" transparent" if transparent else "")
        yield name, saved(image, "GIF", interlace=interlace, **options)
    frames = [Image.fromarray(pixels(3, seed=seed)).quantize(32) for seed in range(3)]
    yield "gif of three frames", saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    yield "gif grey", saved(picture("L"), "GIF")


def _bmp(bits: int, *, top_down: bool = False, masks: tuple[int, ...] = (), compression: int | None = None) -> bytes:
    """A BMP file of uncompressed pixels."""
    rgb = pixels(3)
    palette = b""
    if bits <= 8:
        palette = b"".join(bytes((n * 255 // ((1 << bits) - 1), (n * 7) % 256, 255 - n, 0)) for n in range(1 << bits))
        values = np.minimum(rgb[..., 0] >> (8 - bits), (1 << bits) - 1)
        unpacked = [np.unpackbits(row[:, None], axis=-1)[:, 8 - bits :].ravel() for row in values]
        rows = [np.packbits(row).tobytes() for row in unpacked]
    elif bits == 16:
        shifts = (11, 5, 0) if masks else (10, 5, 0)
        sizes = (5, 6, 5) if masks else (5, 5, 5)
        packed = sum((rgb[..., c].astype(np.uint16) >> (8 - sizes[c])) << shifts[c] for c in range(3))
        rows = [row.astype("<u2").tobytes() for row in np.asarray(packed)]
    else:
        alpha = np.full((HEIGHT, WIDTH, 1), 200, np.uint8)
        full = np.concatenate([rgb[..., ::-1], alpha], axis=-1)[..., : bits // 8]
        rows = [row.tobytes() for row in full]
    rows = [row + bytes(-len(row) % 4) for row in rows]
    body = b"".join(rows if top_down else rows[::-1])
    kind = compression if compression is not None else (3 if masks else 0)
    fields = struct.pack("<4I", *masks, *((0,) if len(masks) == 3 else ())) if masks else b""
    size = 40 + len(fields)  # with the masks inside, as version 3 of the header has them
    head = struct.pack(
        "<IiiHHIIiiII", size, WIDTH, -HEIGHT if top_down else HEIGHT, 1, bits, kind, len(body), 0, 0, 0, 0
    )
    start = 14 + size + len(palette)
    return b"BM" + struct.pack("<IHHI", start + len(body), 0, 0, start) + head + fields + palette + body


def _rle8() -> bytes:
    """A BMP file of 8 bits whose rows are runs."""
    values = pixels(1)[..., 0] // 32 * 32
    body = bytearray()
    for row in values[::-1]:
        for value, run in itertools.groupby(row.tolist()):
            body += bytes((len(list(run)), value))
        body += b"\0\0"
    body += b"\0\1"
    palette = b"".join(bytes((n, 255 - n, n // 2, 0)) for n in range(256))
    head = struct.pack("<IiiHHIIiiII", 40, WIDTH, HEIGHT, 1, 8, 1, len(body), 0, 0, 256, 0)
    start = 14 + 40 + len(palette)
    return b"BM" + struct.pack("<IHHI", start + len(body), 0, 0, start) + head + palette + bytes(body)


def bmps() -> Iterator[Probe]:
    """Depths, both orders of rows, masks, runs."""
    for bits, top_down in itertools.product((1, 4, 8, 16, 24, 32), (False, True)):
        yield f"bmp {bits} bits" + (" top down" if top_down else ""), _bmp(bits, top_down=top_down)
    yield "bmp 16 bits 5-6-5", _bmp(16, masks=(0xF800, 0x7E0, 0x1F))
    yield "bmp 32 bits with masks", _bmp(32, masks=(0xFF0000, 0xFF00, 0xFF, 0xFF000000))
    yield "bmp 8 bits in runs", _rle8()


def tiffs() -> Iterator[Probe]:
    """Modes, compressions, predictors, orientations, many strips."""
    plain = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "I;16")
    for mode, compression in itertools.product(plain, ("raw", "tiff_lzw", "tiff_adobe_deflate", "packbits")):
        yield f"tiff {mode} {compression}", saved(picture(mode), "TIFF", compression=compression)
    for compression in ("tiff_ccitt", "group3", "group4"):
        yield f"tiff 1 {compression}", saved(picture("1"), "TIFF", compression=compression)
    for mode in ("L", "RGB", "CMYK", "YCbCr"):
        yield f"tiff {mode} jpeg", saved(picture(mode), "TIFF", compression="jpeg", quality=80)
    for mode, orientation in itertools.product(("L", "RGB", "CMYK"), range(1, 9)):
        yield f"tiff {mode} orientation {orientation}", saved(picture(mode), "TIFF", tiffinfo={274: orientation})
    for mode in ("L", "RGB", "I;16"):
        shown = saved(picture(mode), "TIFF", compression="tiff_lzw", tiffinfo={317: 2})
        yield f"tiff {mode} tiff_lzw with differences", shown
    for mode in ("L", "RGB"):
        yield f"tiff {mode} strips of three rows", saved(picture(mode), "TIFF", tiffinfo={278: 3}, strip_size=3 * WIDTH)
    yield "tiff big RGB", saved(picture("RGB"), "TIFF", big_tiff=True)


def webps() -> Iterator[Probe]:
    """Lossy and lossless, with and without alpha, orientations, frames after the first."""
    for mode, quality in itertools.product(("RGB", "RGBA"), (10, 50, 80, 100)):
        yield f"webp {mode} quality {quality}", saved(picture(mode), "WEBP", quality=quality)
    for mode, method in itertools.product(("L", "RGB", "RGBA"), (0, 3, 6)):
        yield f"webp {mode} lossless method {method}", saved(picture(mode), "WEBP", lossless=True, method=method)
    yield "webp RGBA with exact colours", saved(picture("RGBA"), "WEBP", lossless=True, exact=True)
    for orientation in range(1, 9):
        yield f"webp RGB orientation {orientation}", saved(picture("RGB"), "WEBP", exif=exif(orientation)[6:])
    frames = [Image.fromarray(pixels(4, seed=seed)) for seed in range(3)]
    yield "webp of three frames", saved(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)


def tone(rate: int, channels: int, seconds: float) -> np.ndarray:
    """Tones with noise and a click, float32 of shape (channels, samples), every channel different."""
    times = np.arange(int(rate * seconds)) / rate
    noise = np.random.default_rng(2).normal(0, 0.02, (channels, times.size))
    waves = np.stack([0.5 * np.sin(2 * np.pi * (330 + 110 * c) * times + c) for c in range(channels)])
    waves[:, times.size // 2] = 0.9
    return (waves + noise).clip(-1, 1).astype(np.float32)


_LAYOUTS: Final = {1: "mono", 2: "stereo", 6: "5.1"}
_CONTAINERS: Final[Mapping[str, tuple[str, ...]]] = {
    "wav": (
        *("pcm_u8", "pcm_s16le", "pcm_s24le", "pcm_s32le", "pcm_f32le", "pcm_f64le", "pcm_alaw", "pcm_mulaw"),
        *("pcm_s64le", "adpcm_ms", "adpcm_ima_wav"),
    ),
    "aiff": ("pcm_s8", "pcm_s16be", "pcm_s24be", "pcm_s32be", "pcm_f32be", "pcm_f64be", "pcm_alaw", "pcm_mulaw"),
    "caf": ("pcm_s16be", "pcm_s24le", "pcm_f32le", "pcm_f64be", "pcm_alaw", "alac", "adpcm_ima_qt"),
    "flac": ("flac",),
    "mp3": ("libmp3lame",),
    "adts": ("aac",),
    "mp4": ("aac", "alac", "flac", "libmp3lame", "libopus", "pcm_s16le"),
    "mov": ("aac", "alac", "pcm_s16be", "pcm_s16le", "pcm_s24be", "pcm_f32le", "pcm_mulaw", "pcm_u8", "pcm_s8"),
    "ogg": ("flac", "libopus", "vorbis"),
    "matroska": (
        "aac",
        "alac",
        "flac",
        "libmp3lame",
        "libopus",
        "vorbis",
        "pcm_s16le",
        "pcm_s32le",
        "pcm_f64le",
        "mp2",
    ),
    "webm": ("libopus", "vorbis"),
}
_ONLY_48K: Final = frozenset({"libopus"})
_ONLY_STEREO: Final = frozenset({"vorbis"})
_MAX_STEREO: Final = frozenset(
    {"adpcm_ima_qt", "adpcm_ima_wav", "adpcm_ms", "libmp3lame", "mp2", "pcm_alaw", "pcm_mulaw"}
)


def clip(container: str, codec: str, rate: int, channels: int) -> bytes:
    """A clip of 8 ms; of 50 where a frame of the codec is long."""
    samples, buffer = tone(rate, channels, 0.008 if codec.startswith("pcm") else 0.05), io.BytesIO()
    experimental = {"strict": "experimental"} if codec == "vorbis" else {}
    with av.open(buffer, "w", format=container, options={"fflags": "+bitexact"}) as file:
        stream = file.add_stream(codec, rate=rate, options={"flags": "+bitexact", **experimental})
        context = stream.codec_context
        context.layout = _LAYOUTS[channels]
        context.bit_rate = 64_000 * channels
        context.format = context.codec.audio_formats[0].name
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=_LAYOUTS[channels])
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        for packet in stream.encode(frame):
            file.mux(packet)
        for packet in stream.encode(None):
            file.mux(packet)
    return buffer.getvalue()


def clips() -> Iterator[Probe]:
    """Every container with every codec that can be written into it; each codec at several rates and channels."""
    seen: set[str] = set()
    for container, codecs in _CONTAINERS.items():
        for codec in codecs:
            kinds = ((16_000, 1), (48_000, 2), (48_000, 6)) if codec not in seen else ((48_000, 2),)
            seen.add(codec)
            for wanted, channels in kinds:
                if (channels > 2 and codec in _MAX_STEREO) or (codec in _ONLY_STEREO and channels != 2):
                    continue
                rate = 48_000 if codec in _ONLY_48K else wanted
                name = f"audio {container} {codec.removeprefix('lib')} {rate} Hz {_LAYOUTS[channels]}"
                yield name, clip(container, codec, rate, channels)
    for rate in (8_000, 11_025, 22_050, 24_000, 32_000, 44_100, 96_000, 192_000):
        yield f"audio wav pcm_s16le {rate} Hz mono", clip("wav", "pcm_s16le", rate, 1)


_VIDEOS: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "mp4": (
        *(("libx264", "yuv420p"), ("libx264", "yuv422p"), ("libx264", "yuv444p"), ("libx264", "yuv420p10le")),
        *(("libx265", "yuv420p"), ("libx265", "yuv420p10le"), ("libsvtav1", "yuv420p"), ("libsvtav1", "yuv420p10le")),
        *(("mpeg4", "yuv420p"), ("libvpx-vp9", "yuv420p"), ("mpeg1video", "yuv420p"), ("mpeg2video", "yuv420p")),
        ("mjpeg", "yuvj420p"),
    ),
    "mov": (
        *(("libx264", "yuv420p"), ("prores", "yuv422p10le"), ("prores_ks", "yuv444p10le"), ("mjpeg", "yuvj422p")),
        *(("h263", "yuv420p"), ("mpeg4", "yuv420p"), ("mpeg2video", "yuv422p"), ("libx265", "yuv420p")),
    ),
    "matroska": (
        *(("libx264", "yuv420p"), ("libx265", "yuv420p"), ("libvpx", "yuv420p"), ("libvpx-vp9", "yuv420p")),
        *(("libsvtav1", "yuv420p"), ("mpeg4", "yuv420p"), ("mjpeg", "yuvj444p"), ("prores", "yuv422p10le")),
        ("msmpeg4", "yuv420p"),
    ),
    "webm": (
        *(("libvpx", "yuv420p"), ("libvpx-vp9", "yuv420p"), ("libvpx-vp9", "yuv422p"), ("libvpx-vp9", "yuv444p")),
        ("libsvtav1", "yuv420p"),
    ),
    "avi": (
        *(("mpeg4", "yuv420p"), ("mjpeg", "yuvj420p"), ("libx264", "yuv420p"), ("msmpeg4", "yuv420p")),
        *(("h263", "yuv420p"), ("mpeg2video", "yuv420p"), ("mpeg1video", "yuv420p")),
    ),
    "mpeg": (("mpeg1video", "yuv420p"), ("mpeg2video", "yuv420p"), ("mpeg2video", "yuv422p")),
}


def film(container: str, codec: str, pixel_format: str, *, size: tuple[int, int] = (64, 48)) -> bytes:
    """Three frames."""
    buffer = io.BytesIO()
    width, height = (128, 96) if codec in ("h263", "libsvtav1") else size
    with av.open(buffer, "w", format=container, options={"fflags": "+bitexact"}) as file:
        stream = file.add_stream(codec, rate=25, options={"flags": "+bitexact", "threads": "1"})
        stream.width, stream.height, stream.pix_fmt = width, height, pixel_format
        for number in range(3):
            shown = np.roll(pixels(3, width=width, height=height), 5 * number, axis=1)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(shown), format="rgb24")))
        file.mux(stream.encode())
    return buffer.getvalue()


_QUARTERS: Final = {90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}


def turned(file: bytes, degrees: int) -> bytes:
    """An MP4 or MOV file with a display matrix: that of its track is replaced."""
    a, b, c, d = _QUARTERS[degrees]
    plain = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    matrix = struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    track = file.index(b"tkhd")
    place = file.index(plain, track)
    return file[:place] + matrix + file[place + len(plain) :]


def films() -> Iterator[Probe]:
    """Every container with every codec that can be written into it, pixel formats, turned frames."""
    for container, kinds in _VIDEOS.items():
        for codec, pixel_format in kinds:
            yield f"video {container} {codec.removeprefix('lib')} {pixel_format}", film(container, codec, pixel_format)
    for container, degrees in itertools.product(("mp4", "mov"), (90, 180, 270)):
        yield f"video {container} turned by {degrees}", turned(film(container, "mpeg4", "yuv420p"), degrees)
    yield "video mp4 x264 odd sides", film("mp4", "libx264", "yuv444p", size=(75, 51))


def main() -> None:
    made: dict[str, bytes] = {}
    sources: tuple[Callable[[], Iterator[Probe]], ...] = (jpegs, pngs, gifs, bmps, tiffs, webps, clips, films)
    for source in sources:
        before = len(made)
        for name, data in source():
            assert name not in made, name
            made[name] = data
        print(f"{source.__name__}: {len(made) - before}")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in made.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_bytes(lzma.compress(packed.getvalue(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{len(made)} probes, {sum(map(len, made.values())):,} bytes, {OUTPUT.stat().st_size:,} packed")


if __name__ == "__main__":
    sys.exit(main())
