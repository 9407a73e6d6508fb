"""The way of a request without an engine: digests, order, tenants, and the cost of very many items."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from semel.cache import Cache, Flight, LruCache, NoCache, SharedCache
from semel.compose import compose_pipeline
from semel.compose.interpreter import tune_interpreter
from semel.core import Digest, Feature, FeatureInfo, Key, Media, Target, Tenant
from semel.errors import InvalidRequest
from semel.render import ChatRequest, Pipeline
from tests.interpreter import restored_interpreter
from tests.waiting import until

Folder = Callable[[str], Path]
TARGET = Target("float32", "engine")


@pytest.fixture(scope="module")
def pipeline(tiny: Folder) -> Pipeline:
    return compose_pipeline(tiny("qwen2-vl"), TARGET, Key(bytes(32)))


def image_part(number: int) -> dict[str, Any]:
    pixels = np.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((56, 56), Image.Resampling.NEAREST).save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*numbers: int) -> ChatRequest:
    return ChatRequest([{"role": "user", "content": [*map(image_part, numbers), {"type": "text", "text": "?"}]}])


async def digests(pipeline: Pipeline, tenant: Tenant | None = None) -> list[Digest]:
    return [item.digest for item in (await pipeline.chat(chat(1, 2, 1), tenant)).prompt.items]


async def test_an_item_is_its_digest_wherever_it_stands(pipeline: Pipeline) -> None:
    first, second, third = await digests(pipeline)
    assert first == third != second


async def test_a_tenant_s_digests_are_unknown_to_every_other_S12(pipeline: Pipeline) -> None:
    tenants = [None, Tenant("a"), Tenant("b"), Tenant("a", "salt")]
    seen = [set(await digests(pipeline, tenant)) for tenant in tenants]
    assert len(set().union(*seen)) == sum(map(len, seen))


async def test_another_key_or_other_options_make_other_digests_S11(pipeline: Pipeline) -> None:
    other_key = replace(pipeline, key=Key(b"k" * 32))
    assert not set(await digests(pipeline)) & set(await digests(other_key))
    wider = replace(chat(1), mm_processor_kwargs={"min_pixels": 28 * 28 * 9})
    first = (await pipeline.chat(chat(1))).prompt
    second = (await pipeline.chat(wider)).prompt
    assert first.items[0].digest != second.items[0].digest
    assert second.timeline[0].length > first.timeline[0].length


async def test_what_cannot_be_part_of_a_digest_is_the_client_s_fault(pipeline: Pipeline) -> None:
    with pytest.raises(InvalidRequest, match="valid Unicode"):
        await pipeline.chat(chat(1), Tenant("", "\ud800"))
    with pytest.raises(InvalidRequest, match="valid JSON"):
        await pipeline.chat(replace(chat(1), mm_processor_kwargs={"size": float("nan")}))


async def test_text_alone_needs_no_feature(pipeline: Pipeline) -> None:
    rendered = await pipeline.chat(ChatRequest([{"role": "user", "content": "hello"}]))
    assert not rendered.features
    assert not rendered.prompt.items


async def test_a_clip_fills_the_encoder_of_an_encoder_decoder_A6(tiny: Folder) -> None:
    import wave

    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, 16_000, 8_000, "NONE", ""))
        file.writeframes(bytes(16_000))
    whisper = compose_pipeline(tiny("whisper"), Target("float32"), Key(bytes(32)))
    draft = whisper.read_transcription(Media("audio", buffer.getvalue()), "<|startoftranscript|>")
    rendered = await whisper.render(draft)
    assert rendered.prompt.encoder_token_ids == (0,) * 1_500
    assert rendered.prompt.timeline.window(3, 4) == (0, 1)
    assert len(rendered.prompt.token_ids) == 1
    with pytest.raises(InvalidRequest, match="does not chat"):
        await whisper.chat(ChatRequest([{"role": "user", "content": "hello"}]))


class Counted:
    """A pipeline's lookups, and how often it processed."""

    def __init__(self, pipeline: Pipeline, cache: Cache) -> None:
        self.counts: Counter[tuple[str, bool]] = Counter()
        self.processed = 0
        self.awaited = 0
        """How many lookups there must be before anything is processed."""
        self._process = pipeline.process
        self.pipeline = replace(pipeline, process=self.process, cache=cache, lookups=self.count, flight=Flight())

    async def process(self, media: Media, options: Mapping[str, object], **_: object) -> Feature:
        self.processed += 1
        await until(lambda: self.counts.total() >= self.awaited)
        return await self._process(media, options)

    def count(self, modality: str, count: int, hit: bool) -> None:
        self.counts[modality, hit] += count


@pytest.fixture(params=["lru", "shared", "none"])
def cache(request: pytest.FixtureRequest) -> Iterator[Cache]:
    kinds: dict[str, Cache] = {"lru": LruCache(1 << 20), "shared": SharedCache.create(1 << 20), "none": NoCache()}
    made = kinds[request.param]
    yield made
    made.close()


async def test_an_item_that_is_cached_is_not_processed_again_and_every_item_counts_once_D8(
    pipeline: Pipeline, cache: Cache
) -> None:
    counted = Counted(pipeline, cache)
    first = await counted.pipeline.chat(chat(1, 2, 1))
    assert counted.processed == 2
    assert counted.counts == {("image", False): 3}
    second = await counted.pipeline.chat(chat(2, 1, 3))
    cached = cache.capacity > 0
    assert counted.processed == (3 if cached else 5)
    assert counted.counts == ({("image", False): 4, ("image", True): 2} if cached else {("image", False): 6})
    assert {digest: bytes(f.tensors["pixel_values"].data) for digest, f in first.features.items()}.items() <= {
        digest: bytes(f.tensors["pixel_values"].data) for digest, f in second.features.items()
    }.items()


async def test_what_is_held_where_the_request_goes_is_only_named_D1_D8(pipeline: Pipeline, cache: Cache) -> None:
    counted = Counted(pipeline, cache)
    whole = await pipeline.chat(chat(1, 2))
    held = {digest: FeatureInfo.of(feature) for digest, feature in whole.features.items()}
    rendered = await counted.pipeline.render(await counted.pipeline.read_chat(chat(1, 2)), held.get)
    assert rendered.prompt == whole.prompt
    assert rendered.features == {}
    assert counted.processed == 0
    assert counted.counts == {("image", True): 2}
    again = await rendered.make(whole.prompt.items[0].digest)
    assert again.layout == held[whole.prompt.items[0].digest].layout
    assert counted.processed == 1
    assert counted.counts.total() == 2


async def test_equal_work_in_flight_is_one_and_joining_is_a_miss_D8(pipeline: Pipeline, cache: Cache) -> None:
    counted = Counted(pipeline, cache)
    counted.awaited = 8
    await asyncio.gather(*(counted.pipeline.chat(chat(4)) for _ in range(8)))
    assert counted.processed == 1
    assert counted.counts == {("image", False): 8}
    assert counted.pipeline.flight.joined == 7


async def test_misses_are_exactly_what_was_processed_or_joined_under_load_D8(pipeline: Pipeline, cache: Cache) -> None:
    rng = random.Random(3)
    counted = Counted(pipeline, cache)
    shown = [rng.sample(range(6), 2) for _ in range(60)]
    for start in range(0, 60, 12):
        await asyncio.gather(*(counted.pipeline.chat(chat(*numbers)) for numbers in shown[start : start + 12]))
        if start == 24:
            cache.clear()
    assert counted.counts.total() == 120
    assert counted.counts["image", False] == counted.processed + counted.pipeline.flight.joined


@pytest.mark.alone
@pytest.mark.slow
async def test_rendering_32768_items_costs_at_most_2_2_times_as_much_as_16384_S16(pipeline: Pipeline) -> None:
    parts = [image_part(number) for number in range(1_024)]
    known: dict[bytes, Feature] = {}

    async def remembering(media: Media, options: Mapping[str, object], **_: object) -> Feature:
        if media.data not in known:
            known[media.data] = await pipeline.process(media, options)
        return known[media.data]

    async def cost_s(items: int) -> float:
        request = ChatRequest([{"role": "user", "content": [parts[i % len(parts)] for i in range(items)]}])
        gc.collect()
        start = time.process_time()
        rendered = await replace(pipeline, process=remembering).chat(request)
        spent = time.process_time() - start
        assert len(rendered.prompt.items) == items
        assert len(rendered.features) == len(parts)
        return spent

    await cost_s(1_024)
    with restored_interpreter():
        tune_interpreter()
        runs = [(await cost_s(16_384), await cost_s(32_768)) for _ in range(7)]
    halves, wholes = zip(*runs, strict=True)
    ratio = min(wholes) / min(halves)
    assert ratio <= 2.2, f"{ratio:.2f} times: {runs}"
