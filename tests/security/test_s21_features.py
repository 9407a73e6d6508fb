"""S21: features that are valid and dear. What no worker or prompt could take is dropped where it was made."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from semel.cache import Cache, LruCache, SharedCache
from semel.core import Digest, Tenant
from semel.errors import MediaTooLarge, PromptTooLong, RequestError
from semel.processing.pool.job import OfferLimits
from semel.processing.pool.pool import Pool
from semel.render import ChatRenderer, Pipeline
from tests.cache.test_contract import PlainLru
from tests.processing.test_pool import TARGET, picture
from tests.render.drawn import FEATURE_BYTES, Drawing, chat

Folder = Callable[[str], Path]
ROOM = 4 << 20
LIMITS = OfferLimits(max_bytes=1 << 20, max_tokens=64)
WIDE = {"min_pixels": 1_000_000, "max_pixels": 1_000_000}
LARGE = {"min_pixels": 160_000, "max_pixels": 161_000}
"""Makes a million bytes of a small picture, so that three of them would need most of the memory."""

VICTIMS = 20
ITEMS = 300
MAX_TOKENS = 200


@pytest.fixture(scope="module")
async def memory() -> AsyncIterator[SharedCache]:
    memory = SharedCache.create(ROOM)
    yield memory
    memory.close()


@pytest.fixture(scope="module")
async def pool(tiny: Folder, memory: SharedCache) -> AsyncIterator[Pool]:
    """Without what a header tells (S29): here, items are made and offered."""
    pool = await Pool.start(tiny("qwen2-vl"), TARGET, processes=1, spares=0, memory=memory)
    pool._offers = LIMITS
    yield pool
    await pool.close()


async def check_that_a_large_feature_evicts_nothing(pool: Pool, memory: SharedCache, wrong: type[RequestError]) -> None:
    """A victim's feature stays in the cache while another tenant's small picture is scaled up beyond all use."""
    memory.clear()
    victim = Digest(bytes([1]) * 32)
    memory.put(victim, await pool.process(picture(140, 84)))
    for apart in (False, True):  # into the shared memory, and through the pipe
        with pytest.raises(wrong):
            await pool.process(picture(64, 64), WIDE, apart=apart)
    assert victim in memory
    assert (await pool.process(picture(84, 84))).nbytes, "the process works on"


@pytest.mark.slow
async def test_a_picture_that_is_scaled_up_beyond_all_use_is_dropped_before_there_is_room_for_it(
    pool: Pool, memory: SharedCache
) -> None:
    await check_that_a_large_feature_evicts_nothing(pool, memory, MediaTooLarge)


@pytest.mark.slow
async def test_so_is_one_that_alone_is_longer_than_a_prompt(
    pool: Pool, memory: SharedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_offers", replace(LIMITS, max_bytes=1 << 30))
    await check_that_a_large_feature_evicts_nothing(pool, memory, PromptTooLong)


@pytest.mark.slow
async def test_mutant_a_pool_that_takes_every_offer_takes_this_one(
    pool: Pool, memory: SharedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OfferLimits, "check", lambda *_: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        await check_that_a_large_feature_evicts_nothing(pool, memory, RequestError)


async def check_that_pictures_that_are_refused_evict_nothing(pool: Pool, memory: SharedCache) -> None:
    """A tenant's twenty pictures fill most of the memory; another's three are scaled up, and refused one by one.

    As in the attack with pictures of 447 bytes at 150 megapixels, at a size that takes no seconds.
    """
    memory.clear()
    digests = [Digest(bytes([number]) * 32) for number in range(VICTIMS)]
    for digest in digests:
        memory.put(digest, await pool.process(picture(168, 168), tenant="B"), tenant="B")
    assert memory.nbytes_of("B") > 0.8 * ROOM
    for number in range(3):
        with pytest.raises(RequestError):
            memory.put(Digest(bytes([100 + number]) * 32), await pool.process(picture(64, 64), LARGE, tenant="A"))
    assert all(digest in memory for digest in digests)
    assert (memory.evictions, memory.nbytes_of("A")) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("limits", [replace(LIMITS, max_bytes=1 << 19), LIMITS], ids=["bytes", "tokens"])
async def test_three_pictures_that_are_refused_evict_none_of_another_tenant_s_twenty(
    pool: Pool, memory: SharedCache, limits: OfferLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_offers", limits)
    monkeypatch.setattr(memory, "evictions", 0)
    await check_that_pictures_that_are_refused_evict_nothing(pool, memory)


@pytest.mark.slow
async def test_mutant_a_pool_that_takes_every_offer_evicts_some(
    pool: Pool, memory: SharedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OfferLimits, "check", lambda *_: None)
    monkeypatch.setattr(memory, "evictions", 0)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        await check_that_pictures_that_are_refused_evict_nothing(pool, memory)
    assert memory.evictions


async def features_made(drawing: Drawing) -> int:
    """How many features are made for a chat with very many pictures, which is refused."""
    pipeline = replace(drawing.pipeline, max_tokens=MAX_TOKENS)
    with pytest.raises(PromptTooLong, match=f"the model takes {MAX_TOKENS:,}"):
        await pipeline.chat(chat(*range(ITEMS)))
    return len(drawing.processed)


async def test_no_more_features_are_made_once_the_prompt_cannot_fit(parts_renderer: ChatRenderer) -> None:
    drawing = Drawing(parts_renderer, LruCache(1 << 20))
    assert await features_made(drawing) < 2 * MAX_TOKENS // 3
    assert len(drawing.cache) < 2 * MAX_TOKENS // 3


async def test_items_that_are_known_count_as_well(parts_renderer: ChatRenderer) -> None:
    drawing = Drawing(parts_renderer, LruCache(1 << 20))
    await drawing.pipeline.chat(chat(*range(ITEMS)))
    drawing.processed.clear()
    assert await features_made(drawing) == 0


async def test_mutant_a_pipeline_that_counts_at_the_end_makes_them_all(
    parts_renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pipeline, "_check_tokens", lambda *_: None)
    drawing = Drawing(parts_renderer, LruCache(1 << 20))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        await features_made(drawing)
    assert len(drawing.processed) == ITEMS


async def check_that_requests_that_cannot_fit_evict_nothing_within_a_share(
    renderer: ChatRenderer, cache: Cache
) -> None:
    """Each item of the requests fits, so its feature is made and cached before their sum is too long."""
    drawing = Drawing(renderer, cache)
    victims = chat(*range(VICTIMS))
    await drawing.pipeline.chat(victims, Tenant("B"))
    pipeline = replace(drawing.pipeline, max_tokens=MAX_TOKENS)
    for number in range(5):
        with pytest.raises(PromptTooLong):
            await pipeline.chat(chat(*range(ITEMS * number, ITEMS * (number + 1))), Tenant("A"))
    drawing.processed.clear()
    await drawing.pipeline.chat(victims, Tenant("B"))
    assert drawing.processed == []


async def test_requests_that_cannot_fit_evict_nothing_of_a_tenant_within_its_share(
    parts_renderer: ChatRenderer,
) -> None:
    cache = LruCache(2 * VICTIMS * FEATURE_BYTES)
    await check_that_requests_that_cannot_fit_evict_nothing_within_a_share(parts_renderer, cache)


async def test_mutant_one_order_for_all_tenants_evicts_them(parts_renderer: ChatRenderer) -> None:
    cache = PlainLru(2 * VICTIMS * FEATURE_BYTES)
    with pytest.raises(AssertionError):
        await check_that_requests_that_cannot_fit_evict_nothing_within_a_share(parts_renderer, cache)
