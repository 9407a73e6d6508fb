"""S29: expensive items of one tenant leave a process to the others, and CPU time is what is shared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from copy import deepcopy

import pytest

from semel.core import Media, Target
from semel.errors import NotReady, PromptTooLong
from semel.fairness.queue import FairQueue
from semel.processing.hf import HfProcessor
from semel.processing.pool.child import check_header, tokens_from_header
from semel.processing.pool.job import OfferLimits
from semel.processing.pool.pool import Pool
from semel.processing.processor import load_processor
from tests.processing.test_pool import TARGET, Folder, picture, stopped
from tests.waiting import until


def queue_of(*names: str) -> FairQueue[int]:
    queue = FairQueue[int]()
    for number, name in enumerate(names):
        queue.add(name, number, number)
    return queue


def test_one_process_serves_a_tenant_whoever_else_has_asked() -> None:
    """With more of them one is left to the others (`tests/fairness/test_machine.py`)."""
    assert queue_of("alice", "mallory").next_for(1) is not None


def order_of(costs: dict[str, float], items: int, *, by_time: bool) -> list[str]:
    """Which tenants one process serves, if each item of a tenant costs so much."""
    queue = queue_of(*[name for name in costs for _ in range(items)])
    served = []
    for _ in range(items):
        tenant = queue.next_for(1)
        assert tenant is not None
        queue.take(tenant)
        tenant.used += costs[tenant.name] if by_time else 0
        served.append(tenant.name)
    return served


def test_a_tenant_pays_the_time_that_its_items_take() -> None:
    served = order_of({"mallory": 10.0, "alice": 0.1}, 50, by_time=True)
    assert served[:3] == ["alice", "mallory", "alice"]
    assert served.count("mallory") == 1


def test_mutant_turns_by_item_give_an_expensive_tenant_nearly_all_of_the_time() -> None:
    assert order_of({"mallory": 10.0, "alice": 0.1}, 50, by_time=False).count("mallory") == 25


TIMEOUT_S = 3.0
MAX_TOKENS = 4_096


@pytest.fixture(scope="module")
async def pool(tiny: Folder) -> AsyncIterator[Pool]:
    """One process, as a small frontend has, and its spare; the shipped pool, with real processors."""
    made = await Pool.start(
        tiny("qwen2-vl"), TARGET, processes=1, spares=1, timeout_s=TIMEOUT_S, offers=OfferLimits(max_tokens=MAX_TOKENS)
    )
    await until(lambda: bool(made.spare_pids))
    yield made
    await made.close()


@pytest.mark.slow
async def test_with_one_process_the_spare_takes_the_other_tenant_s_item(pool: Pool) -> None:
    with stopped(pool):  # mallory's item takes for ever
        stuck = asyncio.create_task(pool.process(picture(64, 64), tenant="mallory"))
        await until(lambda: pool.busy == 1)
        async with asyncio.timeout(TIMEOUT_S):
            await pool.process(picture(96, 64), tenant="alice")
        assert not stuck.done()
    await asyncio.gather(stuck, return_exceptions=True)


@pytest.mark.slow
async def test_an_item_whose_process_was_stopped_may_be_sent_again(pool: Pool) -> None:
    """Nothing is held against it: it is served at once."""
    await until(lambda: len(pool.pids) == 2)
    media = picture(128, 64)
    with stopped(pool), pytest.raises(NotReady):
        await pool.process(media, tenant="alice")
    await until(lambda: bool(pool.pids))
    await pool.process(media, tenant="alice")


@pytest.mark.slow
async def test_an_image_with_too_many_tokens_is_refused_before_a_pixel_is_decoded(pool: Pool) -> None:
    """The pixels of this one cannot be decoded: only its header was looked at. The control has options that fit."""
    await until(lambda: bool(pool.pids))
    cut_off = Media("image", picture(64, 64).data[:60])
    with pytest.raises(PromptTooLong, match="min_pixels"):
        await pool.process(cut_off, {"min_pixels": 100_000_000, "max_pixels": 178_900_000}, tenant="mallory")
    with pytest.raises(Exception, match="image") as raised:
        await pool.process(cut_off, {}, tenant="mallory")
    assert not isinstance(raised.value, PromptTooLong)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(64, 64), (1_024, 768), (30, 900)])
@pytest.mark.parametrize("options", [{}, {"min_pixels": 1_000_000}])
def test_the_header_tells_the_tokens_of_the_layout(
    tiny: Folder, size: tuple[int, int], options: dict[str, object]
) -> None:
    processor = HfProcessor.load(tiny("qwen2-vl"), TARGET)
    media = picture(*size)
    tokens = tokens_from_header(processor.processor, media, options)
    assert tokens == len(processor.process(media, options).layout.token_ids)
    assert tokens_from_header(object(), media, options) is None
    assert tokens_from_header(processor.processor, Media("image", b"no image"), options) is None


@pytest.mark.slow
def test_options_that_a_header_is_asked_with_do_not_reach_other_requests(tiny: Folder) -> None:
    """HF's count writes them into the defaults of every later call; as it is used here, it does not."""
    processor = HfProcessor.load(tiny("idefics3"), TARGET).processor
    options, arguments = {"do_image_splitting": False}, processor.valid_processor_kwargs
    before = deepcopy(arguments._defaults)
    assert tokens_from_header(processor, picture(640, 480), options) is not None
    assert arguments._defaults == before
    processor._get_num_multimodal_tokens(image_sizes=[(480, 640)], **options)  # the control
    assert arguments._defaults != before
    arguments._defaults = before


@pytest.mark.slow
def test_a_generic_model_tells_its_tokens_from_the_header_too(tiny: Folder) -> None:
    """Its HF processor tells nothing, vLLM's prompt updates over a stub do."""
    processor = load_processor("auto", tiny("paddleocr-vl"), Target("float32"))
    media = picture(640, 480)
    tokens = len(processor.process(media).layout)
    assert tokens_from_header(processor.hf_processor, media, {}) is None
    check_header(processor, media, {}, max_tokens=tokens + 1)
    with pytest.raises(PromptTooLong, match=f"{tokens:,} tokens"):
        check_header(processor, media, {}, max_tokens=tokens)
