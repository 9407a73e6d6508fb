"""What a model sees of an image or a clip: S5, S7, S8, S13."""

from __future__ import annotations

import contextlib
import io
import wave
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from semel.errors import MediaDegenerate, MediaError, MediaTooLarge, MediaUndecodable
from semel.media import DecodeLimits, decode_audio, decode_image

LIMITS = DecodeLimits()


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def wav(samples: np.ndarray, rate: int = 16_000) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        channels = 1 if samples.ndim == 1 else samples.shape[1]
        file.setparams((channels, 2, rate, len(samples), "NONE", ""))
        file.writeframes(samples.astype("<i2").tobytes())
    return buffer.getvalue()


def test_an_image_is_turned_upright_S13() -> None:
    image = Image.new("RGB", (4, 2), "red")
    image.putpixel((0, 0), (0, 0, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # taken with the camera turned: shown rotated by a quarter
    decoded = decode_image(encoded(image, exif=exif), LIMITS)
    assert decoded.size == (2, 4)
    assert decoded.getpixel((1, 0)) == (0, 0, 255)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_what_is_transparent_is_white_and_not_what_lies_under_it_S13(mode: str) -> None:
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 0)).convert(mode)
    assert decode_image(encoded(image, "PNG" if mode != "PA" else "TIFF"), LIMITS).getpixel((1, 1)) == (255, 255, 255)


def test_a_colour_that_tRNS_declares_transparent_is_white_S13() -> None:
    image = Image.new("RGB", (4, 4), (10, 20, 30))
    assert decode_image(encoded(image, transparency=(10, 20, 30)), LIMITS).getpixel((1, 1)) == (255, 255, 255)


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "I;16"])
def test_every_mode_becomes_rgb_S13(mode: str) -> None:
    image = Image.new(mode, (4, 4))
    assert decode_image(encoded(image, "TIFF"), LIMITS).mode == "RGB"


@pytest.mark.parametrize("size", [(1, 1), (1, 500), (500, 1)])
def test_an_image_without_extent_is_refused_S8(size: tuple[int, int]) -> None:
    with pytest.raises(MediaDegenerate, match="each side needs 2 pixels"):
        decode_image(encoded(Image.new("RGB", size)), LIMITS)


def test_an_image_over_a_limit_of_ours_is_refused_by_its_size_S5() -> None:
    with pytest.raises(MediaTooLarge, match="40×30, 1,200 pixels; the limit is 1,000"):
        decode_image(encoded(Image.new("RGB", (40, 30))), DecodeLimits(max_image_pixels=1_000))


@pytest.mark.parametrize("data", [b"", b"GIF89a", b"\x00" * 100, b"<svg/>", encoded(Image.new("RGB", (64, 64)))[:60]])
def test_what_is_no_image_is_refused_without_the_decoder_s_words_S7(data: bytes) -> None:
    with pytest.raises(MediaUndecodable) as caught:
        decode_image(data, LIMITS)
    assert "0x" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_a_format_that_is_not_listed_is_not_opened_S6() -> None:
    with pytest.raises(MediaUndecodable):
        decode_image(encoded(Image.new("RGB", (8, 8)), "JPEG2000"), LIMITS)


def test_a_clip_is_the_mean_of_its_channels_S13() -> None:
    left = np.full(1_600, 8_000)
    samples = decode_audio(wav(np.stack([left, -left], axis=1)), LIMITS, sampling_rate=16_000)
    assert samples.shape == (1_600,)
    assert np.abs(samples).max() == 0


def test_a_clip_keeps_its_samples_at_its_own_rate() -> None:
    original = np.arange(-1_000, 1_000)
    samples = decode_audio(wav(original), LIMITS, sampling_rate=16_000)
    assert samples.dtype == np.float32
    assert np.array_equal(samples * 32_768, original)


def test_a_clip_of_another_rate_is_resampled() -> None:
    time = np.arange(48_000) / 48_000
    samples = decode_audio(wav(np.sin(2 * np.pi * 100 * time) * 9_000, 48_000), LIMITS, sampling_rate=16_000)
    assert abs(len(samples) - 16_000) < 50
    assert np.argmax(np.abs(np.fft.rfft(samples))) == pytest.approx(100, abs=2)


def test_a_clip_without_samples_is_refused_S8() -> None:
    with pytest.raises(MediaError):
        decode_audio(wav(np.zeros(0)), LIMITS, sampling_rate=16_000)


def test_a_clip_over_the_limit_is_refused_S5() -> None:
    with pytest.raises(MediaTooLarge, match=r"limit of 0\.5 s"):
        decode_audio(wav(np.zeros(16_000)), DecodeLimits(max_audio_s=0.5), sampling_rate=16_000)


def test_a_playlist_that_names_another_file_is_not_followed_S6(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret.wav").write_bytes(wav(np.ones(1_600)))
    monkeypatch.chdir(tmp_path)
    for playlist in (b"ffconcat version 1.0\nfile secret.wav\n", b"#EXTM3U\n#EXTINF:1,\nsecret.wav\n"):
        with pytest.raises(MediaUndecodable):
            decode_audio(playlist, LIMITS, sampling_rate=16_000)


def test_a_clip_of_values_that_are_no_numbers_is_refused_S8() -> None:
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, np.full(1_600, np.nan, np.float32), 16_000, format="WAV", subtype="FLOAT")
    with pytest.raises(MediaDegenerate, match="no numbers"):
        decode_audio(buffer.getvalue(), LIMITS, sampling_rate=16_000)


def test_a_thousand_damaged_files_give_a_value_or_an_error_of_ours_S6_S7() -> None:
    rng = np.random.default_rng(0)
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8))
    files = [encoded(image, kind, exif=exif) for kind in ("JPEG", "PNG", "WEBP")]
    for _ in range(1_000):
        data = bytearray(files[rng.integers(len(files))])
        for position in rng.integers(0, len(data), 3):
            data[position] = rng.integers(256)
        with contextlib.suppress(MediaError):
            decode_image(bytes(data), LIMITS)


@pytest.mark.parametrize("data", [b"", b"RIFF", b"\x00" * 500, wav(np.zeros(100))[:30]])
def test_what_is_no_clip_is_refused_without_the_decoder_s_words_S7(data: bytes) -> None:
    with pytest.raises(MediaError) as caught:
        decode_audio(data, LIMITS, sampling_rate=16_000)
    assert "Errno" not in str(caught.value)
