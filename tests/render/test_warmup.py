"""The warm-up: both paths, every modality that may be sent, and no trace of it afterwards (E3)."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from semel.cache import Cache, LruCache, NoCache, SharedCache
from semel.compose import compose_pipeline
from semel.core import Feature, Key, Layout, Media, Modality, Target, Tensor
from semel.media import DecodeLimits, decode_audio, decode_image
from semel.media.decode.warmup_media import sample_clip, sample_image
from semel.render import ChatRenderer, Pipeline, warm_up

Folder = Callable[[str], Path]
EVERYTHING: Mapping[Modality, int] = {"image": 4, "audio": 1, "video": 1}


class Processor:
    """Counts what it is given, and fails if it is told to."""

    def __init__(self) -> None:
        self.given: Counter[str] = Counter()
        self.error: Exception | None = None
        self.hangs = False

    async def process(self, media: Media, options: Mapping[str, object], **_: object) -> Feature:
        assert options == {}
        self.given[media.modality] += 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None and media.modality == "image":
            raise self.error
        return Feature(media.modality, {"x": Tensor("uint8", (8,), memoryview(bytes(8)))}, Layout((1, 2)))


class Warmed:
    """A pipeline, what it counts, and what its warm-up logged."""

    def __init__(self, renderer: ChatRenderer, cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
        self.processor = Processor()
        self.counted: Counter[str] = Counter()
        self._caplog = caplog
        self.pipeline = Pipeline(
            renderer.tokenizer, renderer, self.processor.process, "f", Key(bytes(32)), cache, lookups=self._count
        )

    def _count(self, modality: str, count: int, hit: bool) -> None:
        self.counted[f"{modality} {hit}"] += count

    async def warm_up(self, limits: Mapping[Modality, int], processes: int = 1, timeout_s: float = 60.0) -> None:
        with self._caplog.at_level(logging.INFO, "semel.render"):
            await warm_up(self.pipeline, limits, processes=processes, timeout_s=timeout_s)

    def lines(self, level: int) -> list[str]:
        return [record.getMessage() for record in self._caplog.records if record.levelno == level]

    def left(self) -> list[int]:
        """All that could have been left behind."""
        pipeline = self.pipeline
        caches = [len(pipeline.cache), pipeline.cache.nbytes, pipeline.cache.evictions, len(pipeline.layouts)]
        return [*caches, self.counted.total(), pipeline.flight.joined, pipeline.inspections.joined]


@pytest.fixture(params=["lru", "none", "shared", "tiny"])
def cache(request: pytest.FixtureRequest) -> Iterator[Cache]:
    kinds: dict[str, Cache] = {
        "lru": LruCache(1 << 20),
        "none": NoCache(),
        "shared": SharedCache.create(1 << 16),
        "tiny": LruCache(64),
    }
    made = kinds[request.param]
    yield made
    for one in kinds.values():
        one.close()


@pytest.fixture
def warmed(parts_renderer: ChatRenderer, cache: Cache, caplog: pytest.LogCaptureFixture) -> Warmed:
    return Warmed(parts_renderer, cache, caplog)


async def test_nothing_is_cached_or_counted_afterwards_and_both_durations_are_logged_E3(warmed: Warmed) -> None:
    await warmed.warm_up(EVERYTHING, processes=3)
    assert warmed.left() == [0] * 7
    assert warmed.processor.given == {
        "image": 8,
        "audio": 8,
        "video": 8,
    }  # on each path once per process, and once in a chat
    execute, inspect = warmed.lines(logging.INFO)
    assert re.fullmatch(r"warmed up execute \(text, audio, image, video\) in \d+\.\d{3} s", execute)
    assert re.fullmatch(r"warmed up inspect \(text, audio, image, video\) in \d+\.\d{3} s", inspect)
    assert not warmed.lines(logging.WARNING)


async def test_what_requests_may_not_have_is_skipped_E3(warmed: Warmed) -> None:
    await warmed.warm_up({"image": 0, "audio": 1})
    assert set(warmed.processor.given) == {"audio"}
    assert "warmed up execute (text, audio)" in warmed.lines(logging.INFO)[0]
    await warmed.warm_up({})
    assert set(warmed.processor.given) == {"audio"}


@pytest.mark.parametrize("error", [RuntimeError("the processor is broken"), TimeoutError("too slow"), MemoryError()])
async def test_a_warm_up_that_fails_is_a_warning_with_its_cause_and_goes_on_with_the_rest_E3(
    warmed: Warmed, error: Exception
) -> None:
    warmed.processor.error = error
    await warmed.warm_up(EVERYTHING, processes=2)
    warnings = warmed.lines(logging.WARNING)
    cause = str(error) or "MemoryError()"
    assert warnings == [f"warming up {intent} with image failed: {cause}" for intent in ("execute", "inspect")]
    assert warmed.processor.given["audio"] == 6
    assert all("(text, audio, video) in" in line for line in warmed.lines(logging.INFO))
    assert warmed.left() == [0] * 7


async def test_a_warm_up_that_hangs_is_given_up_E3(warmed: Warmed) -> None:
    warmed.processor.hangs = True
    await warmed.warm_up(EVERYTHING, timeout_s=0.05)
    given_up = [f"warming up {intent} was given up after 0.05 s" for intent in ("execute", "inspect")]
    assert warmed.lines(logging.WARNING) == given_up
    assert warmed.left() == [0] * 7


@pytest.mark.parametrize("family", [pytest.param("qwen2-vl", marks=pytest.mark.slow), "qwen2-audio", "whisper"])
async def test_real_processors_take_the_samples_E3(tiny: Folder, caplog: pytest.LogCaptureFixture, family: str) -> None:
    modality: Modality = "image" if family == "qwen2-vl" else "audio"
    pipeline = compose_pipeline(tiny(family), Target("float32"), Key(bytes(32)))
    with caplog.at_level(logging.INFO, "semel.render"):
        await warm_up(pipeline, {modality: 1})
    ours = [record for record in caplog.records if record.name.startswith("semel.render")]
    assert [record.levelno for record in ours] == [logging.INFO] * 2
    assert all(modality in record.getMessage() for record in ours)


def test_samples_are_files_that_decode_and_differ_by_their_number() -> None:
    image = decode_image(sample_image().data, DecodeLimits())
    assert (image.size, image.mode) == ((1024, 1024), "RGB")
    clip = decode_audio(sample_clip().data, DecodeLimits(), sampling_rate=16_000)
    assert clip.shape == (16_000,)
    assert abs(clip).max() > 0.2
    assert sample_image(1) != sample_image(2)
    assert sample_clip(1) != sample_clip(2)
