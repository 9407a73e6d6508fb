"""vLLM's real scheduler, stepped by hand: what goes wrong with stock parts, and does not with ours.

No engine process is started: a test's worker keeps the identifiers that it was told to encode, and names what a step
would miss.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from semel.engine.vllm.compat.versions import installed_version
from semel.lab.bench.stepping import Kind, Step, Stepper

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

MakeFeature = Callable[..., "Worked"]


class Worked:
    """A stepper with the encoder side of a worker: drops, encodes, and looks for what a step needs."""

    def __init__(self, stepper: Stepper, *, steps_ahead: int = 0) -> None:
        self.stepper = stepper
        self.steps_ahead = steps_ahead
        self.unanswered: list[Step] = []
        self.tensors: set[str] = set()
        self.encoded: list[str] = []

    def step(self) -> list[str]:
        """One step; the identifiers that it needs and does not find."""
        self.unanswered.append(step := self.stepper.plan())
        missing = self._execute(step.output)
        if len(self.unanswered) > self.steps_ahead:
            self.stepper.answer(self.unanswered.pop(0))
        return missing

    def _execute(self, output: Any) -> list[str]:
        requests = self.stepper.scheduler.requests
        self.tensors.difference_update(output.free_encoder_mm_hashes)
        for name, indices in output.scheduled_encoder_inputs.items():
            encoded = [requests[name].mm_features[index].identifier for index in indices]
            self.tensors.update(encoded)
            self.encoded += encoded
        return [
            feature.identifier
            for name, tokens in output.num_scheduled_tokens.items()
            for feature in requests[name].mm_features
            if self._overlaps(feature.mm_position, requests[name].num_computed_tokens, tokens)
            and feature.identifier not in self.tensors
        ]

    @staticmethod
    def _overlaps(place: Any, computed: int, tokens: int) -> bool:
        return bool(place.offset < computed and computed - tokens < place.offset + place.length)


@pytest.fixture
def make(tiny: Callable[[str], Path]) -> MakeFeature:
    def made(kind: Kind, *, is_async: bool = False, **arguments: Any) -> Worked:
        stepper = Stepper.create(kind, tiny("qwen2-vl"), is_async=is_async, **arguments)
        return Worked(stepper, steps_ahead=int(is_async))

    return made


def until_the_planner_is_preempted(worked: Worked, *, with_sharer: bool) -> list[str]:
    """Every step computes 32 tokens of each request; in the fourth, `low` plans to encode the item and is preempted."""
    worked.stepper.add("low", [("item", 100, 10)], tokens=140, priority=5)
    worked.stepper.add("short", [], tokens=4, max_new_tokens=1, priority=5)
    missing = worked.step()
    if with_sharer:
        worked.stepper.add("sharer", [("item", 70, 10)], tokens=140)
    worked.stepper.add("high", [], tokens=140)
    missing += [name for _ in range(3) for name in worked.step()]
    assert [request.request_id for request in worked.stepper.scheduler.waiting] == ["low"]
    return missing


def arguments(kv_blocks: int) -> dict[str, Any]:
    return {
        "scheduling_policy": "priority",
        "long_prefill_token_threshold": 32,
        "tokens_per_step": 128,
        "kv_blocks": kv_blocks,
        "scheduler_reserve_full_isl": False,
    }


@pytest.mark.parametrize(("kind", "expected"), [("stock", ["item"]), ("cache", []), ("planning", [])])
def test_b7_a_later_request_is_not_told_that_a_cancelled_encode_is_resident(
    make: MakeFeature, kind: Kind, expected: list[str]
) -> None:
    worked = make(kind, **arguments(kv_blocks=14))
    assert until_the_planner_is_preempted(worked, with_sharer=False) == []
    worked.stepper.add("later", [("item", 0, 10)], tokens=12, priority=1)
    assert worked.step() == expected
    assert worked.encoded == ["item"] * (not expected)


@pytest.mark.parametrize(("kind", "expected"), [("stock", ["item"]), ("cache", []), ("planning", [])])
def test_b7_a_request_of_the_same_step_finds_the_item_of_a_cancelled_encode(
    make: MakeFeature, kind: Kind, expected: list[str]
) -> None:
    worked = make(kind, **arguments(kv_blocks=19))
    assert until_the_planner_is_preempted(worked, with_sharer=True) == expected
    sharer = worked.stepper.scheduler.requests["sharer"]
    # Our cache alone has the sharer wait a step, just before the item; our scheduler lets it encode the item itself.
    assert sharer.num_computed_tokens == {"stock": 96, "cache": 70, "planning": 96}[kind]
    assert worked.encoded == {"stock": [], "cache": [], "planning": ["item"]}[kind]
    if kind != "stock":
        assert worked.step() == []
        assert worked.encoded == ["item"]


@pytest.mark.parametrize("kind", ["cache", "planning"])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("disable_chunked_mm_input", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_b_and_c_whatever_comes_every_step_finds_its_embeddings_and_every_request_ends(
    make: MakeFeature, kind: Kind, policy: str, disable_chunked_mm_input: bool, is_async: bool
) -> None:
    from vllm.v1.request import RequestStatus

    rng = random.Random(0)
    worked = make(
        kind,
        is_async=is_async,
        scheduling_policy=policy,
        tokens_per_step=96,
        encoder_embeds=40,
        long_prefill_token_threshold=40,
        kv_blocks=40,
        mm_processor_kwargs={"max_pixels": 28 * 28 * 24},
        limit_mm_per_prompt={"image": 8, "video": 0},
        disable_chunked_mm_input=disable_chunked_mm_input,
        scheduler_reserve_full_isl=False,
    )
    scheduler = worked.stepper.scheduler
    cache = scheduler.encoder_cache_manager
    sizes = [rng.randint(1, 24) for _ in range(12)]
    preempted = 0
    for number in range(300):
        if number < 150:
            for copy in range(2):
                items, end = random_items(rng, sizes)
                worked.stepper.add(
                    f"{number}.{copy}", items, tokens=end + 1, max_new_tokens=30, priority=rng.randrange(3)
                )
        if rng.random() < 0.1 and scheduler.requests:
            scheduler.finish_requests(rng.choice(list(scheduler.requests)), RequestStatus.FINISHED_ABORTED)
        assert worked.step() == []
        preempted = max([preempted, *(request.num_preemptions for request in scheduler.requests.values())])
        assert 0 <= cache.num_free_slots <= cache.num_freeable_slots <= cache.cache_size
    while scheduler.requests:
        assert worked.step() == []
    assert preempted > 0
    assert cache.num_freeable_slots == cache.cache_size
    totals = cache.totals
    assert totals.planned == len(worked.encoded)
    assert totals.evictions > 0
    assert totals.cut > 0
    assert totals.resident == sum(sizes[int(name.removeprefix("item"))] for name in worked.tensors)


def random_items(rng: random.Random, sizes: list[int]) -> tuple[list[tuple[str, int, int]], int]:
    items, end = [], rng.randint(0, 3)
    for _ in range(rng.randint(0, 4)):
        which = rng.randrange(len(sizes))
        items.append((f"item{which}", end, sizes[which]))
        end += sizes[which] + rng.randint(0, 20)
    return items, end


def test_an_identifier_of_two_sizes_ends_its_request_with_an_error(make: MakeFeature) -> None:
    worked = make("planning")
    worked.stepper.add("first", [("item", 0, 10)], tokens=12)
    worked.stepper.add("second", [("item", 0, 11)], tokens=12)
    worked.step()
    assert "first" in worked.stepper.scheduler.requests
    assert "second" not in worked.stepper.scheduler.requests


def test_overlapping_items_are_planned_by_vllm_itself(make: MakeFeature, caplog: pytest.LogCaptureFixture) -> None:
    worked = make("planning")
    worked.stepper.add("video with sound", [("video", 0, 10), ("sound", 4, 3)], tokens=12)
    with caplog.at_level(logging.WARNING, "semel"):
        assert worked.step() == []
    assert worked.encoded == ["video", "sound"]
    assert "planned by vLLM, not by semel: placeholders 0 and 1 overlap" in caplog.text


def test_a_session_that_grows_is_planned_without_reading_its_past_again(make: MakeFeature) -> None:
    worked = make("planning")
    request = worked.stepper.add("session", [("a", 0, 4)], tokens=6, max_new_tokens=8)
    assert worked.step() == []
    before = worked.stepper.scheduler._request(request)
    request.mm_features.extend(_later(request.mm_features[0], "b", 8))
    after = worked.stepper.scheduler._request(request)
    assert list(after.keys) == ["a", "b"]
    assert after.timeline[0] is before.timeline[0]


def _later(feature: Any, identifier: str, offset: int) -> list[Any]:
    from dataclasses import replace

    return [replace(feature, identifier=identifier, mm_position=replace(feature.mm_position, offset=offset))]


@pytest.mark.parametrize("kind", ["cache", "planning"])
def test_an_unknown_vllm_gets_its_own_parts_and_a_warning(
    make: MakeFeature, kind: Kind, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("semel.engine.vllm.compat.versions.TESTED", ("0.1",))
    with caplog.at_level(logging.WARNING, "semel"):
        scheduler = make(kind).stepper.scheduler
    assert type(scheduler).__module__.startswith("vllm.")
    assert type(scheduler.encoder_cache_manager).__module__.startswith("vllm.")
    assert f"was tested with vLLM 0.1, not with {installed_version()}" in caplog.text
    assert "Missing: " in caplog.text


def test_vllm_0_31_gets_its_own_scheduler_and_semel_s_cache(
    make: MakeFeature, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from semel.engine.vllm.plugins.encoder_cache import EncoderCache

    monkeypatch.setattr("semel.engine.vllm.compat.versions.installed_version", lambda: "0.31.0")
    with caplog.at_level(logging.WARNING, "semel"):
        scheduler = make("planning").stepper.scheduler
    assert type(scheduler).__module__.startswith("vllm.")
    assert isinstance(scheduler.encoder_cache_manager, EncoderCache)
    assert "semel's scheduler was tested with vLLM 0.32, not with 0.31.0" in caplog.text
