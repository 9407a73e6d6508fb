"""Long clips cut where they are quiet: all of a clip, once, in linear time, where vLLM cuts it (S5, S16)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from semel.errors import MediaDegenerate, MediaTooLarge
from semel.media import DecodeLimits, cut_audio, decode_audio
from semel.media.decode.clip_cuts import find_cuts, wav_of
from tests.sounds import FORMATS, recorded, spoken

RATE = 16_000
LIMITS = DecodeLimits()


def cut(data: bytes, limits: DecodeLimits = LIMITS) -> list[np.ndarray]:
    """The samples of every piece, as its file decodes."""
    pieces = cut_audio(data, limits, sampling_rate=RATE, max_s=30)
    return [decode_audio(bytes(file), limits, sampling_rate=RATE) for file in pieces.files]


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        *(("wav", seconds) for seconds in (1.0, 30.0, 30.2)),
        ("mp3-44k", 1.0),
        *(pytest.param(kind, 95.0, marks=pytest.mark.slow) for kind in ("wav", "mp3-44k", "webm")),
    ],
)
def test_the_pieces_are_the_clip_sample_by_sample(kind: str, seconds: float) -> None:
    data = recorded(spoken(np.random.default_rng(1), seconds, FORMATS[kind][2]), kind)
    pieces = cut(data)
    assert np.array_equal(np.concatenate(pieces), decode_audio(data, LIMITS, sampling_rate=RATE))
    assert max(piece.size for piece in pieces) <= 30 * RATE
    assert len(pieces) == 1 or min(piece.size for piece in pieces[:-1]) >= 29 * RATE


def test_a_clip_is_cut_in_a_pause_where_the_naive_cut_is_in_a_word() -> None:
    """The control: every 30 s."""
    samples = spoken(np.random.default_rng(2), 100)
    samples[:] = np.where(np.abs(samples) < 0.05, 0.05, samples)
    pause = int(29.4 * RATE)
    samples[pause : pause + 3_200] = 0
    (first, *_) = find_cuts(samples, sampling_rate=RATE, max_s=30)
    assert not samples[first : first + 1_600].any()
    naive = 30 * RATE
    assert samples[naive : naive + 1_600].any()


def test_a_pause_that_is_everywhere_is_cut_and_ends() -> None:
    for samples in (np.zeros(100 * RATE, np.float32), np.ones(100 * RATE, np.float32)):
        assert list(find_cuts(samples, sampling_rate=RATE, max_s=30)) == [29 * RATE * place for place in (1, 2, 3)]
        assert len(list(find_cuts(samples, sampling_rate=RATE, max_s=1))) == 99


def test_a_clip_of_a_thousand_pieces_is_looked_at_once_S16() -> None:
    """The control is a cutter that looks at all of the rest for every piece."""
    looked = 0

    class Watched(np.ndarray):
        def __getitem__(self, place: Any) -> Any:
            nonlocal looked
            if isinstance(place, slice):
                looked += len(range(*place.indices(self.size)))
            return super().__getitem__(place)

    samples = np.zeros(1_000 * RATE, np.float32).view(Watched)
    pieces = sum(1 for _ in find_cuts(samples, sampling_rate=RATE, max_s=2))
    assert pieces > 900
    assert looked < 4 * samples.size
    looked = 0
    for begin in range(0, samples.size, 2 * RATE):
        _ = samples[begin:].view(np.ndarray).min()
    assert looked > 200 * samples.size


def test_a_clip_of_exactly_the_limit_is_taken_and_a_longer_one_refused_S5() -> None:
    limits = DecodeLimits(max_audio_s=90.0)
    samples = spoken(np.random.default_rng(3), 90)
    assert sum(piece.size for piece in cut(wav_of(samples, RATE), limits)) == samples.size
    longer = np.append(samples, np.float32(0))
    with pytest.raises(MediaTooLarge, match="--max-audio-s"):
        cut(wav_of(longer, RATE), limits)


def test_a_clip_of_nothing_is_refused_S8() -> None:
    with pytest.raises(MediaDegenerate):
        cut(wav_of(np.empty(0, np.float32), RATE))


@pytest.mark.parametrize("rate", [8_000, 44_100, 48_000])
def test_a_resampled_clip_keeps_its_end(rate: int) -> None:
    """The control: a resampler that is not flushed holds the last millisecond back."""
    import av

    samples = spoken(np.random.default_rng(4), 2.0, rate)
    whole = decode_audio(wav_of(samples, rate), LIMITS, sampling_rate=RATE)
    assert whole.size == 2 * RATE
    frame = av.AudioFrame.from_ndarray(samples[np.newaxis], format="fltp", layout="mono")
    frame.sample_rate = rate
    naive = sum(part.samples for part in av.AudioResampler("fltp", "mono", RATE).resample(frame))
    assert naive < whole.size


@pytest.mark.slow
def test_clips_are_cut_where_vllm_cuts_them() -> None:
    from vllm.multimodal.audio import split_audio

    rng = np.random.default_rng(5)
    for round_ in range(30):
        samples = spoken(rng, float(rng.uniform(31, 200)))
        if round_ % 5 == 0:
            samples = np.round(samples * 8) / 8  # windows of equal energy
        for max_s in (30, 2, 1):
            theirs = split_audio(samples, RATE, max_s, 1, 1_600)
            ours = [*find_cuts(samples, sampling_rate=RATE, max_s=max_s), samples.size]
            assert ours == np.cumsum([piece.size for piece in theirs]).tolist()
