"""How long each stage of a request takes, told once for each request that executes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from semel.cache import LruCache
from semel.render import ChatRenderer, Pipeline, warm_up
from semel.telemetry.stages import Stage
from tests.render.drawn import FEATURE_BYTES, Drawing, chat


class _Told:
    def __init__(self, renderer: ChatRenderer) -> None:
        self.stages: list[Stage] = []
        self.seconds = 0.0
        drawing = Drawing(renderer, LruCache(8 * FEATURE_BYTES))
        self.pipeline: Pipeline = replace(drawing.pipeline, timings=self.tell)

    def tell(self, seconds: float, stage: Stage) -> None:
        assert seconds >= 0
        self.stages.append(stage)
        self.seconds += seconds


@pytest.fixture
def told(parts_renderer: ChatRenderer) -> _Told:
    return _Told(parts_renderer)


async def test_a_new_item_is_processed_and_a_known_one_is_not(told: _Told) -> None:
    await told.pipeline.chat(chat(1))
    await told.pipeline.chat(chat(1))
    first = ["parse", "digest", "layout", "process", "render"]
    assert told.stages == [*first, *(stage for stage in first if stage != "process")]


async def test_a_chat_without_items_has_no_stage_of_items(told: _Told) -> None:
    await told.pipeline.chat(chat())
    assert told.stages == ["parse", "render"]


async def test_who_only_looks_is_not_timed(told: _Told) -> None:
    draft = await told.pipeline.read_chat(chat(1), intent="inspect")
    await told.pipeline.inspector.render(draft)
    assert told.stages == []


async def test_a_warm_up_is_not_timed_E3(told: _Told) -> None:
    await warm_up(told.pipeline, {})
    assert told.stages == []
