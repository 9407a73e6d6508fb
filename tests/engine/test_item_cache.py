"""Known items on the real engine: referred to by digest, injected, evicted, lost and found again.

The engine's item cache has room for about forty-four of the small pictures, and a step for a few of them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from semel.core import Digest, Feature, FeatureInfo, Submission
from semel.engine.vllm.compat.internals import encoder_arguments
from semel.engine.vllm.plugins.encoder_metrics import EncoderPage
from semel.errors import FeatureMissing, FeatureRejected
from semel.render import ChatRequest, Rendered
from tests.engine.families import WRONG_QWEN2_VL
from tests.engine.parity import GREEDY, Answer, Rig, draw_image, image_part, joined, running
from tests.engine.rendering import rebuilt
from tests.engine.test_item_cache_mirror import Replay

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ITEM_BYTES = 16 * 1_176 + 24
"""Of a picture of 56 by 56."""
CACHE_BYTES = int(44.5 * ITEM_BYTES)
SAMPLED: Mapping[str, object] = {"temperature": 1.0, "top_k": 1}
"""What is greedy to all but vLLM, which grants `n` only to the others."""
numbers = count()


@dataclass(frozen=True)
class Asker(Rig):
    """A rig that withholds what the engine says it holds, and tells whenever something went wrong."""

    page: EncoderPage
    replay: Replay = field(default_factory=Replay)
    lost: list[FeatureMissing] = field(default_factory=list)
    """What streams said was missing: the engine core was not as its mirror."""

    async def picture(self, rng: np.random.Generator, side: int = 56) -> Rendered:
        return await self.pictures([draw_image(rng, side=side)])

    async def pictures(self, pictures: list[bytes]) -> Rendered:
        content = [*map(image_part, pictures), {"type": "text", "text": "what is in this picture ?"}]
        return await self.pipeline.chat(ChatRequest([{"role": "user", "content": content}]))

    async def ask(self, rendered: Rendered, given: Mapping[Digest, Feature], **sampling: object) -> Answer:
        """One submission, as it stands."""
        return joined([output async for output in await self.submit(rendered, given, **sampling)])

    async def submit(self, rendered: Rendered, given: Mapping[Digest, Feature], **sampling: object) -> Any:
        return await self.engine.submit(
            Submission(f"request-{next(numbers)}", rendered.prompt, given, {**GREEDY, **sampling})
        )

    async def by_reference(self, rendered: Rendered) -> Answer:
        return await self.ask(rendered, {})

    async def withholding(self, rendered: Rendered) -> Answer:
        """As a worker does: without what is held, and again with everything if that is not enough."""
        known = {digest: f for digest, f in rendered.features.items() if not self.engine.holds(digest)}
        for given in (known, rendered.features, rendered.features):
            try:
                stream = await self.submit(rendered, given)
            except FeatureMissing:
                continue  # it went while this one waited for its turn
            try:
                return joined([output async for output in stream])
            except FeatureMissing as error:
                self.lost.append(error)
        raise AssertionError("missing though everything was given")

    def check(self) -> None:
        """What was told is what the engine holds, and no more than fits."""
        held = self.engine.item_cache
        assert self.replay.held == {digest: held.holding(digest) for digest in held}
        assert held.nbytes == sum(one.nbytes for one in self.replay.held.values()) <= held.capacity
        assert set(self.llm.renderer.mm_processor_cache._cache) == {digest.hex() for digest in held}

    async def encoded(self) -> int:
        """How many items the engine's encoder was asked for so far; the core steps between two calls to it."""
        await self.llm.is_sleeping()
        await self.llm.is_sleeping()
        return self.page.read()[0].queries

    @contextmanager
    def weighing(self) -> Iterator[list[int]]:
        """The bytes of every message to the engine core meanwhile."""
        sent: list[int] = []
        client, encoder = self.llm.engine_core, self.llm.engine_core.encoder

        class Scales:
            def encode(self, value: Any) -> Any:
                frames = encoder.encode(value)
                sent.append(sum(memoryview(frame).nbytes for frame in frames))
                return frames

        client.encoder = Scales()
        try:
            yield sent
        finally:
            client.encoder = encoder


@pytest.fixture(scope="module")
async def started(tiny: Callable[[str], Path]) -> AsyncIterator[Asker]:
    arguments = {
        "max_model_len": 2_048,
        "max_num_batched_tokens": 256,
        "block_size": 32,
        "limit_mm_per_prompt": {"image": 64, "video": 0},
        "mm_processor_cache_gb": CACHE_BYTES / 2**30,
    }
    page = EncoderPage.create()
    plugged = encoder_arguments({"metrics": page.path})
    async with running(tiny("qwen2-vl"), **arguments, **plugged) as rig:
        asker = Asker(rig.engine, rig.pipeline, rig.folder, page)
        rig.engine.watch(asker.replay)
        yield asker
    page.close()


@pytest.fixture
async def asker(started: Asker) -> AsyncIterator[Asker]:
    await started.engine.reset()
    started.lost.clear()
    yield started
    started.check()
    assert started.llm.get_num_unfinished_requests() == 0


async def test_a_repeat_by_digest_alone_is_answered_as_with_its_data_and_hardly_costs_a_byte_D1(asker: Asker) -> None:
    rng = np.random.default_rng(1)
    large = await asker.picture(rng, side=280)
    (digest,) = large.features
    with asker.weighing() as first:
        expected = await asker.ask(large, large.features)
    assert asker.engine.holds(digest)
    assert asker.engine.holding(digest) == FeatureInfo.of(large.features[digest])
    with asker.weighing() as repeats:
        assert await asker.by_reference(large) == expected
        assert await asker.ask(large, large.features) == expected
    assert sum(first) > large.features[digest].nbytes > 400_000
    assert sum(repeats) < 4_000


async def test_a_reference_to_what_is_not_held_or_stands_elsewhere_is_refused_without_a_trace_S9(asker: Asker) -> None:
    rendered = await asker.picture(np.random.default_rng(2))
    (digest,) = rendered.features
    with pytest.raises(FeatureMissing) as missing:
        await asker.by_reference(rendered)
    assert missing.value.digests == (digest,)
    expected = await asker.ask(rendered, rendered.features)
    larger = await asker.picture(np.random.default_rng(2), side=112)
    disguised = replace(larger.prompt, items=rendered.prompt.items)
    with pytest.raises(FeatureRejected, match="in the prompt, its feature has"):
        await asker.ask(replace(larger, prompt=disguised), {})
    assert await asker.by_reference(rendered) == expected


async def test_300_random_requests_by_reference_where_possible_are_answered_as_alone_D2(asker: Asker) -> None:
    rng, choice = np.random.default_rng(3), random.Random(3)
    media = [draw_image(rng, side=56) for _ in range(120)]
    prompts = [await asker.pictures([one]) for one in media]
    prompts += [await asker.pictures(choice.choices(media, k=choice.randint(2, 30))) for _ in range(20)]
    expected = {}
    for number, prompt in enumerate(prompts):
        await asker.engine.reset()
        expected[number] = await asker.ask(prompt, prompt.features)
    assert len({answer.token_ids for answer in expected.values()}) > 100
    evictions = asker.engine.item_cache.evictions
    waiting = iter([choice.randrange(len(prompts)) for _ in range(300)])

    async def ask_on() -> None:
        for number in waiting:
            prompt = prompts[number]
            if choice.random() < 0.1:
                await asker.engine.inject(*choice.choice(list(prompt.features.items())))
            if choice.random() < 0.1:
                await (await asker.submit(prompt, prompt.features, n=2, **SAMPLED)).close()
            assert await asker.withholding(prompt) == expected[number]
            asker.check()

    async with asyncio.TaskGroup() as group:
        for _ in range(6):
            group.create_task(ask_on())
    assert asker.lost == []
    assert asker.engine.item_cache.evictions - evictions > 200
    by_digest = {digest: number for number, prompt in enumerate(prompts[:120]) for digest in prompt.features}
    for digest in asker.engine.item_cache:  # what the mirror holds, the engine core does
        assert await asker.by_reference(prompts[by_digest[digest]]) == expected[by_digest[digest]]
    assert len(asker.engine.item_cache) == 44


async def test_an_engine_core_that_lost_its_items_is_told_of_before_the_first_token_and_repaired_D3(
    asker: Asker,
) -> None:
    prompts = [await asker.picture(np.random.default_rng(seed)) for seed in (6, 7, 8)]
    expected = [await asker.ask(prompt, prompt.features) for prompt in prompts]
    both = await asker.pictures([draw_image(np.random.default_rng(seed), side=56) for seed in (6, 7)])
    answer = await asker.by_reference(both)
    await asker.llm.engine_core.reset_mm_cache_async()
    assert len(asker.engine.item_cache) == 3
    with pytest.raises(FeatureMissing) as missing:
        await asker.ask(both, {}, n=2, **SAMPLED)
    assert set(missing.value.digests) == set(both.features)
    assert list(asker.engine.item_cache) == list(prompts[2].features)
    asker.check()
    assert await asker.ask(both, both.features) == answer
    assert [await asker.withholding(prompt) for prompt in prompts] == expected
    assert len(asker.lost) == 1
    assert [await asker.by_reference(prompt) for prompt in prompts] == expected


async def test_100_injections_are_held_or_evicted_in_order_and_the_encoder_does_not_run_D6(asker: Asker) -> None:
    rng = np.random.default_rng(10)
    prompts = [await asker.picture(rng) for _ in range(100)]
    expected = {index: await asker.ask(prompts[index], prompts[index].features) for index in (56, 70, 99)}
    await asker.engine.reset()
    encoded = await asker.encoded()
    injected = [asker.engine.inject(digest, f) for prompt in prompts for digest, f in prompt.features.items()]
    assert all(await asyncio.gather(*injected))
    assert await asker.encoded() == encoded
    assert list(asker.engine.item_cache) == [digest for prompt in prompts[56:] for digest in prompt.features]
    for index, answer in expected.items():
        assert await asker.by_reference(prompts[index]) == answer
    assert await asker.encoded() == encoded + len(expected)


@pytest.mark.parametrize("case", WRONG_QWEN2_VL)
async def test_a_malformed_item_is_not_injected_D7(asker: Asker, case: str) -> None:
    rendered = await asker.picture(np.random.default_rng(11))
    ((digest, right),) = rendered.features.items()
    feature = rebuilt(rendered, WRONG_QWEN2_VL[case].change(right)).features[digest]
    with pytest.raises(FeatureRejected):
        await asker.engine.inject(digest, feature)
    assert len(asker.engine.item_cache) == 0
    assert await asker.engine.inject(digest, rendered.features[digest])
    await asker.by_reference(rendered)


async def test_an_item_larger_than_the_cache_rides_with_its_request_and_is_not_announced_D4(asker: Asker) -> None:
    rng = np.random.default_rng(12)
    small = await asker.picture(rng)
    data = draw_image(rng, side=448)
    large, twice = await asker.pictures([data]), await asker.pictures([data, data])
    ((digest, feature),) = large.features.items()
    assert feature.nbytes > CACHE_BYTES
    before = await asker.ask(small, small.features)
    assert not await asker.engine.inject(digest, feature)
    expected = await asker.ask(large, large.features)
    await asker.ask(twice, twice.features)
    assert await asker.ask(large, large.features) == expected
    assert list(asker.engine.item_cache) == list(small.features)
    with pytest.raises(FeatureMissing):
        await asker.by_reference(large)
    assert await asker.by_reference(small) == before


@pytest.mark.parametrize("n", [1, 2])
async def test_a_request_whose_items_exceed_the_cache_travels_whole_and_leaves_it_in_order_D4(
    asker: Asker, n: int
) -> None:
    rng = np.random.default_rng(13)
    media = [draw_image(rng, side=56) for _ in range(60)]
    many = await asker.pictures(media)
    singles = [await asker.pictures([one]) for one in media]
    expected = [await asker.ask(one, one.features) for one in singles]
    await asker.engine.reset()
    answer = await asker.ask(many, many.features)
    assert list(asker.engine.item_cache) == list(many.features)[-44:]
    absent = [digest for digest in many.features if not asker.engine.holds(digest)]
    given = {digest: many.features[digest] for digest in absent}
    for _ in range(2):
        with pytest.raises(FeatureMissing) as missing:  # those that are held would be evicted before their turn
            await asker.ask(many, given, n=n, **SAMPLED)
        assert set(missing.value.digests) == set(many.features) - set(given)
    outputs = [output async for output in await asker.submit(many, many.features, n=n, **SAMPLED)]
    for index in range(n):
        assert joined([output for output in outputs if output.index == index]) == answer
    for index in range(16, 60):
        assert await asker.by_reference(singles[index]) == expected[index]
    assert await asker.withholding(many) == answer


async def test_a_reset_with_eight_requests_in_flight_forgets_everything_and_all_are_answered_D5(asker: Asker) -> None:
    """They go by reference, and prefixes of before cover their items: vLLM dies if it has to run such a one again."""
    rng = np.random.default_rng(14)
    prompts = [await asker.pictures([draw_image(rng, side=112) for _ in range(3)]) for _ in range(8)]
    expected = [await asker.ask(prompt, prompt.features, max_tokens=80) for prompt in prompts]
    for wait in (True, False):
        await asyncio.gather(*(asker.ask(prompt, prompt.features) for prompt in prompts[:5]))
        streams = [await asker.submit(prompt, prompt.features, max_tokens=80) for prompt in prompts]
        begun = [[await anext(aiter(stream))] if wait else [] for stream in streams]
        await asker.engine.reset()
        assert len(asker.engine.item_cache) == 0
        assert asker.replay.held == {}
        for outputs, stream, answer in zip(begun, streams, expected, strict=True):
            outputs += [output async for output in stream]
            assert joined(outputs) == answer
    await asyncio.gather(*(asker.withholding(prompt) for prompt in prompts))
    assert asker.lost == []


async def test_prefixes_of_before_a_reset_are_not_used_after_it_even_with_a_request_in_flight_D5(
    asker: Asker,
) -> None:
    rendered = await asker.pictures([draw_image(np.random.default_rng(15), side=112) for _ in range(3)])

    async def cached_tokens(salt: str | None = None) -> int:
        submission = Submission(f"request-{next(numbers)}", rendered.prompt, rendered.features, GREEDY, salt)
        stream = await asker.engine.submit(submission)
        first = await stream._collector.get()
        await stream.close()
        return int(first.num_cached_tokens)

    for salt in (None, "salt"):
        await asker.engine.reset()
        assert await cached_tokens(salt) == 0
        assert await cached_tokens(salt) > 0
        running_on = await asker.submit(rendered, rendered.features, max_tokens=500)
        await anext(aiter(running_on))
        await asker.engine.reset()
        assert await cached_tokens(salt) == 0
        assert await cached_tokens(salt) > 0
        assert await cached_tokens("another") == 0
        await running_on.close()


async def test_a_submission_that_is_cancelled_while_it_waits_leaves_no_trace_D3(asker: Asker) -> None:
    rng = np.random.default_rng(16)
    prompts = [await asker.picture(rng) for _ in range(12)]
    expected = [await asker.ask(prompt, prompt.features) for prompt in prompts]
    await asker.engine.reset()
    async with asker.engine._order:
        tasks = [asyncio.create_task(asker.submit(prompt, prompt.features)) for prompt in prompts]
        await asyncio.sleep(0)
        for task in tasks[1::2]:
            task.cancel()
    await asyncio.wait(tasks)
    assert [task.cancelled() for task in tasks] == [False, True] * 6
    assert len(asker.engine.item_cache) == 6
    for task in tasks[::2]:
        await task.result().close()
    assert [await asker.withholding(prompt) for prompt in prompts] == expected
    assert asker.lost == []
