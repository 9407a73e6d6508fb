"""A request with a thousand items: the worker's event loop goes on.

What runs in the worker's process is real, vLLM's part too; only the engine core is not (`coreless`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from semel.aio import at_once, in_slices
from semel.core import Digest, Feature, Item, Layout, Placeholder, Prompt, Submission, Tensor, Timeline
from semel.engine.vllm.engine import VllmEngine
from semel.engine.vllm.requests import intake as request_intake
from semel.engine.vllm.requests import item_builder
from semel.engine.vllm.requests.item_cache import ItemCache
from semel.engine.vllm.requests.item_delivery import BATCH_ITEMS, ItemDelivery
from tests.engine.coreless import Core, coreless
from tests.engine.parity import nothing_due

pytestmark = [pytest.mark.engine, pytest.mark.timeout(580)]

TICK_S = 0.001
_GRID = memoryview(b"".join(side.to_bytes(8, "little") for side in (1, 2, 2)))
THOUSAND = 1_024
ANSWERS = 16

Folder = Callable[[str], Path]


@asynccontextmanager
async def engine_of(folder: Path, items: int) -> AsyncIterator[tuple[VllmEngine, Core]]:
    limits = json.dumps({"image": items, "video": 0})
    flags = ("--max-model-len", str(2 * items + 1_000), "--limit-mm-per-prompt", limits)
    async with coreless(folder, *flags) as made:
        yield made


class Gaps:
    """How much CPU time the loop's thread takes between two timers: the same on a busy machine."""

    def __init__(self) -> None:
        self.cpu_ms: list[float] = []

    async def watch(self) -> None:
        cpu = time.thread_time()
        while True:
            await asyncio.sleep(TICK_S)
            used = time.thread_time()
            self.cpu_ms.append((used - cpu) * 1e3)
            cpu = used

    def __str__(self) -> str:
        return f"longest {max(self.cpu_ms):.1f} ms"


def small_feature(number: int, token: int) -> Feature:
    """The smallest image of Qwen2-VL: four patches, one token."""
    pixels = bytearray(4 * 1176)
    pixels[:8] = number.to_bytes(8, "little")
    tensors = {
        "pixel_values": Tensor("uint8", (4, 1176), memoryview(pixels)),
        "image_grid_thw": Tensor("int64", (3,), _GRID),
    }
    return Feature("image", tensors, Layout((token,)))


def submission_of(name: str, count: int, token: int, **sampling: object) -> Submission:
    """A prompt of so many distinct items, each behind a token of text."""
    features = {Digest(number.to_bytes(Digest.size, "big")): small_feature(number, token) for number in range(count)}
    places = [Placeholder(2 * number + 1, 1) for number in range(count)]
    prompt = Prompt([7, token] * count, Timeline.decoder(places), tuple(Item("image", digest) for digest in features))
    return Submission(name, prompt, features, {"max_tokens": 4, **sampling})


def token_of(folder: Path) -> int:
    """The placeholder of images."""
    return int(json.loads((folder / "config.json").read_text())["image_token_id"])


@dataclass(frozen=True)
class Started:
    """An engine whose core does nothing, and the placeholder of its images."""

    engine: VllmEngine
    core: Core
    token: int

    async def submit_some(self, submission: Submission) -> tuple[Gaps, list[int]]:
        """The same, with the smallest gaps of a few rounds: other work of this process only makes them longer."""
        return min([await self.submit(submission) for _ in range(3)], key=lambda one: max(one[0].cpu_ms))

    async def submit(self, submission: Submission) -> tuple[Gaps, list[int]]:
        """The gaps while a submission goes in, and the bytes of the messages to the engine core."""
        await self.engine.reset()
        self.core.messages.clear()
        gaps = Gaps()
        watching = asyncio.create_task(gaps.watch())
        await asyncio.sleep(2 * TICK_S)
        stream = await self.engine.submit(submission)
        await asyncio.sleep(2 * TICK_S)
        watching.cancel()
        assert {output.index async for output in stream} == set(range(ANSWERS if "n" in submission.sampling else 1))
        await stream.close()
        return gaps, list(self.core.messages)


@pytest.fixture(scope="module")
async def started(tiny: Folder) -> AsyncIterator[Started]:
    folder = tiny("qwen2-vl")
    async with engine_of(folder, THOUSAND) as (engine, core):
        yield Started(engine, core, token_of(folder))


async def test_the_loop_has_no_gap_while_a_thousand_items_are_submitted(started: Started) -> None:
    """The control does all at once on the loop, as it was."""
    many = submission_of("many", THOUSAND, started.token)
    gaps, messages = await started.submit_some(many)
    assert len(messages) == THOUSAND / BATCH_ITEMS + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ItemDelivery, "due", nothing_due)
        patch.setattr(item_builder, "FEW_ITEMS", THOUSAND)
        patch.setattr(request_intake, "FEW_ITEMS", THOUSAND)
        patch.setattr(request_intake, "in_slices", without_slices)
        control, _ = await started.submit_some(many)
    assert max(gaps.cpu_ms) <= 50, f"{gaps}; control: {control}"
    assert max(control.cpu_ms) > 2 * max(gaps.cpu_ms), f"{gaps}; control: {control}"


async def test_several_answers_with_a_thousand_items_each_leave_the_loop_its_turns(started: Started) -> None:
    """vLLM sends a message for each answer. The control has no pauses between them."""
    several = submission_of("several", THOUSAND, started.token, n=ANSWERS)
    gaps, _ = await started.submit_some(several)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(started.core, "add_request_async", partial(Core.add_request_async, started.core))
        control, _ = await started.submit_some(several)
    assert max(gaps.cpu_ms) <= 50, f"{gaps}; control: {control}"
    assert max(control.cpu_ms) > 2 * max(gaps.cpu_ms), f"{gaps}; control: {control}"


async def cancel_amid_its_items(started: Started, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Cancel a request that touches what is held and pushes out what is not; whether both halves are alike then."""
    engine, core = started.engine, started.core
    await engine.reset()
    one, two, many = (submission_of(name, count, started.token) for name, count in (("a", 1), ("b", 2), ("c", 300)))
    for submission in (two, one):  # the items of `one` are those of `two` as well: their order changes
        async for _ in await engine.submit(submission):
            pass
    put, puts = ItemCache._put, 0

    def counting(*args: Any) -> Any:
        nonlocal puts
        puts += 1
        if puts == 100:
            submitting.cancel()
        return put(*args)

    with monkeypatch.context() as patch:
        patch.setattr(ItemDelivery, "due", nothing_due)
        patch.setattr(ItemCache, "_put", counting)
        patch.setattr(request_intake, "in_slices", partial(in_slices, slice_s=0.0001))
        submitting = asyncio.create_task(engine.submit(many))
        with pytest.raises(asyncio.CancelledError):
            await submitting
    assert puts >= 100
    assert not core.is_running("c")
    return list(engine.item_cache._sender._cache.order) == list(core.received._cache.order)


async def test_a_request_that_is_cancelled_amid_its_items_leaves_mirror_and_engine_core_alike(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant breaks the admission off: the mirror has renewed what the engine core has not."""
    assert await cancel_amid_its_items(started, monkeypatch)
    monkeypatch.setattr(request_intake, "to_the_end", broken_off)
    assert not await cancel_amid_its_items(started, monkeypatch)
    await started.engine.reset()


async def broken_off(work: Any) -> Any:
    return await work


async def without_slices(work: Any) -> Any:
    return at_once(work)


async def test_vllm_checks_a_request_once_whatever_items_it_has_and_says_nothing_of_how_it_comes(
    started: Started, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    processor = started.engine._llm.input_processor
    check, checked = processor.process_inputs, Counter[str]()

    def count(request_id: str, *rest: Any, **more: Any) -> Any:
        checked[request_id] += 1
        return check(request_id, *rest, **more)

    monkeypatch.setattr(processor, "process_inputs", count)
    sizes = (1, 2, item_builder.FEW_ITEMS, item_builder.FEW_ITEMS + 1)
    for size in sizes:
        stream = await started.engine.submit(submission_of(f"with {size}", size, started.token))
        await stream.close()
    assert [checked[f"with {size}"] for size in sizes] == [1, 1, 1, 1]
    assert "EngineCoreRequest" not in caplog.text


async def test_items_of_several_answers_go_to_the_engine_core_once(started: Started) -> None:
    """The control sends them with each answer, as vLLM does."""
    several = submission_of("several", 4, started.token, n=ANSWERS)
    features = sum(feature.nbytes for feature in several.features.values())
    _, messages = await started.submit(several)
    assert [nbytes > features for nbytes in messages] == [True, *[False] * ANSWERS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ItemDelivery, "due", nothing_due)
        _, control = await started.submit(several)
    assert [nbytes > features for nbytes in control] == [True] * ANSWERS
