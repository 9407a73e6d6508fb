"""The second path: it gives the same prompts, and nothing that `execute` can see is changed by it (E1)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semel.cache import Cache, LayoutCache, LruCache, NoCache, SharedCache
from semel.core import Feature, FeatureInfo, Media
from semel.errors import MediaTooLarge, MediaUndecodable
from semel.render import ChatRenderer
from tests.effort import examples
from tests.render.drawn import FEATURE_BYTES, Drawing, chat, drawn

ITEMS = 4
"""How many features the caches have room for."""

KINDS: dict[str, Callable[[], Cache]] = {
    "lru": lambda: LruCache(ITEMS * FEATURE_BYTES),
    "none": NoCache,
    "shared": lambda: SharedCache.create(ITEMS * FEATURE_BYTES),
}


@pytest.fixture(params=sorted(KINDS))
def make_cache(request: pytest.FixtureRequest) -> Iterator[Callable[[], Cache]]:
    made: list[Cache] = []

    def make() -> Cache:
        made.append(KINDS[request.param]())
        return made[-1]

    yield make
    for cache in made:
        cache.close()


async def inspect(drawing: Drawing, *numbers: int) -> object:
    draft = await drawing.pipeline.read_chat(chat(*numbers))
    return (await drawing.pipeline.inspector.render(draft)).prompt


requests = st.lists(
    st.tuples(st.sampled_from(["execute", "inspect", "tensors"]), st.lists(st.integers(0, 9), min_size=1, max_size=3)),
    max_size=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=examples(40))
@given(requests)
def test_whoever_executes_sees_the_same_whether_others_inspect_or_not_E1(
    parts_renderer: ChatRenderer, make_cache: Callable[[], Cache], sent: list[tuple[str, list[int]]]
) -> None:
    async def run() -> None:
        watched, undisturbed = Drawing(parts_renderer, make_cache()), Drawing(parts_renderer, make_cache())
        for intent, numbers in sent:
            draft = await watched.pipeline.read_chat(chat(*numbers))
            if intent == "execute":
                prompt = (await watched.pipeline.render(draft)).prompt
                assert prompt == (await undisturbed.pipeline.chat(chat(*numbers))).prompt
            elif intent == "inspect":
                rendered = await watched.pipeline.inspector.render(draft)
                assert not rendered.features
                layouts = [drawn(await draft.media_of(item.digest)).layout for item in draft.items]
                assert [place.length for place in rendered.prompt.timeline] == [len(layout) for layout in layouts]
                assert [place.mask for place in rendered.prompt.timeline] == [layout.mask for layout in layouts]
            else:
                await watched.pipeline.inspector.features(draft, max_bytes=1 << 20)
            assert watched.seen() == undisturbed.seen()
            held = [[item.digest in one.cache for item in draft.items] for one in (watched, undisturbed)]
            assert held[0] == held[1]

    asyncio.run(run())


async def test_a_thousand_inspections_change_neither_content_nor_order_nor_counters_E1(
    parts_renderer: ChatRenderer, make_cache: Callable[[], Cache]
) -> None:
    drawing, twin = Drawing(parts_renderer, make_cache()), Drawing(parts_renderer, make_cache())
    order = [3, 1, 2, 0]
    for one in (drawing, twin):
        for number in (*range(ITEMS), *order):
            await one.pipeline.chat(chat(number))
    digests = [(await drawing.pipeline.read_chat(chat(number))).items[0].digest for number in range(ITEMS)]

    def content() -> list[bool]:
        return [digest in drawing.cache for digest in digests]

    before, held = drawing.seen(), content()
    for number in range(1_000):
        await inspect(drawing, number % 37, number % 11)
    assert drawing.seen() == before
    assert content() == held
    for number in range(100, 100 + ITEMS):  # what goes for it, one by one, is the order
        await drawing.pipeline.chat(chat(number))
        await twin.pipeline.chat(chat(number))
        assert content() == [digest in twin.cache for digest in digests]
        assert drawing.seen() == twin.seen()


async def test_what_one_path_has_processed_the_other_path_only_looks_up_E1(parts_renderer: ChatRenderer) -> None:
    drawing = Drawing(parts_renderer, NoCache())
    executed = await drawing.pipeline.chat(chat(1, 2))
    assert await inspect(drawing, 1, 2) == executed.prompt
    await inspect(drawing, 2, 3, 3)
    await inspect(drawing, 3, 1)
    assert sorted(drawing.processed) == [1, 2, 3]


async def test_what_a_worker_has_announced_is_not_processed_for_an_inspection(parts_renderer: ChatRenderer) -> None:
    drawing = Drawing(parts_renderer, NoCache())
    draft = await drawing.pipeline.read_chat(chat(1, 2))
    held = {digest: FeatureInfo.of(drawn(await draft.media_of(digest))) for digest in draft.media}
    rendered = await drawing.pipeline.inspector.render(draft, held.get)
    assert rendered.prompt == (await drawing.pipeline.chat(chat(1, 2))).prompt
    assert drawing.processed == [1, 2]  # by the chat


async def test_equal_inspections_in_flight_are_one_and_execution_does_not_join_them(
    parts_renderer: ChatRenderer,
) -> None:
    drawing = Drawing(parts_renderer, NoCache())
    await asyncio.gather(*(inspect(drawing, 1) for _ in range(8)), drawing.pipeline.chat(chat(1)))
    assert drawing.processed.count(1) <= 2
    assert drawing.pipeline.flight.joined == 0


async def test_inspections_process_apart_where_processing_writes_into_the_main_cache_E1(
    parts_renderer: ChatRenderer,
) -> None:
    drawing, apart = Drawing(parts_renderer, NoCache()), Drawing(parts_renderer, NoCache())
    drawing.pipeline = replace(drawing.pipeline, process_apart=apart.process)
    await inspect(drawing, 1)
    await drawing.pipeline.chat(chat(2))
    assert (drawing.processed, apart.processed) == ([2], [1])


async def test_tensors_are_those_that_are_executed_and_are_bounded(parts_renderer: ChatRenderer) -> None:
    drawing = Drawing(parts_renderer, NoCache())
    draft = await drawing.pipeline.read_chat(chat(5, 6, 5))
    features = await drawing.pipeline.inspector.features(draft, max_bytes=2 * FEATURE_BYTES)
    assert list(features) == list(draft.media)
    assert features == (await drawing.pipeline.chat(chat(5, 6, 5))).features
    with pytest.raises(MediaTooLarge, match="8,191 bytes"):
        await drawing.pipeline.inspector.features(draft, max_bytes=2 * FEATURE_BYTES - 1)
    rendered = await drawing.pipeline.inspector.render(draft)
    assert await rendered.make(draft.items[1].digest) == features[draft.items[1].digest]


async def test_a_fault_of_an_item_is_told_and_not_remembered(parts_renderer: ChatRenderer) -> None:
    drawing = Drawing(parts_renderer, NoCache())
    failing = True

    async def process(media: Media, options: Mapping[str, object], **_: object) -> Feature:
        if failing:
            raise MediaUndecodable("not an image")
        return drawn(media)

    drawing.pipeline = replace(drawing.pipeline, process=process, layouts=LayoutCache())
    with pytest.raises(MediaUndecodable):
        await inspect(drawing, 1)
    failing = False
    assert await inspect(drawing, 1) == (await drawing.pipeline.chat(chat(1))).prompt
