"""What a model hears of a clip (S6)."""

from __future__ import annotations

import io
import wave
from pathlib import Path

import numpy as np
import pytest

from semel.errors import MediaUndecodable
from semel.media import DecodeLimits, decode_audio

LIMITS = DecodeLimits()


def wav(samples: np.ndarray, rate: int = 16_000) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        channels = 1 if samples.ndim == 1 else samples.shape[1]
        file.setparams((channels, 2, rate, len(samples), "NONE", ""))
        file.writeframes(samples.astype("<i2").tobytes())
    return buffer.getvalue()


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


def test_a_playlist_that_names_another_file_is_not_followed_S6(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret.wav").write_bytes(wav(np.ones(1_600)))
    monkeypatch.chdir(tmp_path)
    for playlist in (b"ffconcat version 1.0\nfile secret.wav\n", b"#EXTM3U\n#EXTINF:1,\nsecret.wav\n"):
        with pytest.raises(MediaUndecodable):
            decode_audio(playlist, LIMITS, sampling_rate=16_000)
