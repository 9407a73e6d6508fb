"""vLLM's renderer with semel's pool: what its engine gets is what vLLM's own renderer gives it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.entrypoints.common.offline import OfflineInferenceMixin
from vllm.multimodal.cache import ShmObjectStoreSenderCache
from vllm.renderers.base import BaseRenderer
from vllm.renderers.registry import RENDERER_REGISTRY

from semel.processing.pool.pool import Pool
from semel.vllm_plugin import renderer
from semel.vllm_plugin.counters import COUNTS
from semel.vllm_plugin.levels import LevelOff
from semel.vllm_plugin.pool_items import PoolItems, num_processes
from tests.engine.family_questions import kinds_of_chats
from tests.vllm_plugin.image_files import damaged_files, image_files, photo
from tests.vllm_plugin.rendering import Made, Renderers, opened, renderers, unopened
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def qwen(tiny: Folder) -> Iterator[Renderers]:
    with renderers("qwen2-vl", tiny("qwen2-vl")) as both:
        yield both


async def test_requests_before_the_pool_is_ready_wait_and_the_loop_goes_on(
    qwen: Renderers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first test: its request starts the pool."""
    data = image_files()["png"]
    opening, start = asyncio.Event(), Pool.start
    gate = asyncio.run_coroutine_threadsafe(opening.wait(), asyncio.get_running_loop())

    async def late(*arguments: Any, **settings: Any) -> Pool:
        await asyncio.wrap_future(gate)
        return await start(*arguments, **settings)

    monkeypatch.setattr(Pool, "start", late)
    waiting = asyncio.ensure_future(qwen.door_prompt([unopened(data)]))
    stock = await qwen.stock_prompt([opened(data)])  # the loop is free meanwhile
    assert not waiting.done()
    opening.set()
    assert (await waiting).differs(stock) == ""


async def test_twenty_kinds_of_files_are_rendered_as_by_vllm_new_known_and_evicted(qwen: Renderers) -> None:
    files = image_files()
    hashes = set()
    for kind, data in files.items():
        for state in ("new", "known", "evicted"):
            if state != "known":
                qwen.forget()
            ours, stock = await qwen.door_prompt([unopened(data)]), await qwen.stock_prompt([opened(data)])
            assert ours.differs(stock) == "", (kind, state)
            assert (ours.items["image"][0] is None) == (state == "known")
            hashes.add(ours.hashes["image"][0])
    assert len(hashes) == len(files) == 20  # one for each file, whatever its state


async def test_a_file_that_vllm_has_opened_keeps_vllms_hash(qwen: Renderers) -> None:
    qwen.forget()
    for data in image_files().values():
        ours, stock = await qwen.door_prompt([opened(data)]), await qwen.stock_prompt([opened(data)])
        assert (ours.differs(stock), ours.hashes) == ("", stock.hashes)


@pytest.mark.parametrize("settings", [{"image_mode": None}, {"image_mode": "L"}, {"rgba_background_color": (9, 8, 7)}])
async def test_settings_of_vllms_loader_are_followed(qwen: Renderers, settings: dict[str, Any]) -> None:
    data = image_files()["png, rgba"]
    qwen.forget()
    stock = await qwen.stock_prompt([opened(data, **settings)])
    assert (await qwen.door_prompt([unopened(data, **settings)])).differs(stock) == ""


async def test_damaged_files_are_refused_in_vllms_words(qwen: Renderers) -> None:
    for kind, data in damaged_files().items():
        with pytest.raises(ValueError) as expected:
            opened(data)
        with pytest.raises(ValueError) as ours:
            await qwen.door_prompt([unopened(data)])
        assert _without_address(ours) == _without_address(expected), kind


def _without_address(error: pytest.ExceptionInfo[ValueError]) -> str:
    return str(error.value).partition(" at 0x")[0]


async def test_old_new_and_equal_images_in_one_prompt_are_rendered_as_by_vllm(qwen: Renderers) -> None:
    old, new, other = list(image_files().values())[:3]
    qwen.forget()
    for items in ([old], [new, old, new, other], [other, new]):
        ours = await qwen.door_prompt([unopened(data) for data in items])
        assert ours.differs(await qwen.stock_prompt([opened(data) for data in items])) == ""


async def test_a_swapped_item_shows(qwen: Renderers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: each test above would fail if items were given to each other's requests."""
    first, second = image_files()["png"], image_files()["jpeg"]
    qwen.forget()
    join = PoolItems.join

    def swapped(self: PoolItems, mm_hash: str, media: Any, order: Any) -> Any:
        data = second if media.data == first else first
        return join(self, mm_hash, type(media)(media.modality, data), order)

    monkeypatch.setattr(PoolItems, "join", swapped)
    ours = await qwen.door_prompt([unopened(first), unopened(second)])
    assert ours.differs(await qwen.stock_prompt([opened(first), opened(second)])) == "image 0"


async def test_equal_images_that_come_at_once_are_made_once(qwen: Renderers) -> None:
    data = image_files()["webp"]
    qwen.forget()
    before = COUNTS.copy()
    made = await asyncio.gather(*(qwen.door_prompt([unopened(data)]) for _ in range(16)))
    assert COUNTS["preprocessed"] - before["preprocessed"] == 1
    assert COUNTS["joined"] - before["joined"] <= 15
    assert sum(one.items["image"][0] is not None for one in made) == 1, "the engine gets it once, as from vLLM"
    assert qwen.door._items._flights == {}


async def test_an_item_that_is_evicted_before_its_commit_is_made_again(
    qwen: Renderers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt's known image is lost while its new one is made: no decoder runs in this process for it."""
    known, new = image_files()["png"], image_files()["bmp"]
    qwen.forget()
    await qwen.door_prompt([unopened(known)])
    commit = qwen.door._commit
    lost: list[Any] = []

    def losing(work: Any, ready: Any) -> Any:
        if not lost:
            qwen.door._mm_processor_cache.clear_cache()
            lost.append(work)
        return commit(work, ready)

    monkeypatch.setattr(qwen.door, "_commit", losing)
    before = COUNTS["preprocessed"]
    ours = await qwen.door_prompt([unopened(known), unopened(new)])
    qwen.stock._mm_processor_cache.clear_cache()
    assert ours.differs(await qwen.stock_prompt([opened(known), opened(new)])) == ""
    assert COUNTS["preprocessed"] - before == 2


async def test_a_file_that_crashes_its_decoder_is_refused_and_nobody_elses_is(qwen: Renderers) -> None:
    deadly, innocent = image_files()["gif, animated"], image_files()["tiff"]
    qwen.forget()
    before = COUNTS["pool_refusals"]
    pool = qwen.door._items._pool
    for pid in pool.pids:
        os.kill(pid, signal.SIGSTOP)
    first, *others = pool.pids
    waiting = asyncio.ensure_future(qwen.door_prompt([unopened(deadly)]))
    await until(lambda: bool(pool.busy))
    for pid in (first, *others):
        os.kill(pid, signal.SIGSEGV)
        os.kill(pid, signal.SIGCONT)
    with pytest.raises(ValueError, match="the image crashes the process that decodes it"):
        await waiting
    with pytest.raises(ValueError, match="the image crashes the process that decodes it"):
        await qwen.door_prompt([unopened(deadly)])
    ours = await qwen.door_prompt([unopened(innocent)])
    assert ours.differs(await qwen.stock_prompt([opened(innocent)])) == ""
    assert COUNTS["pool_refusals"] - before == 2


async def test_a_request_that_goes_away_leaves_nothing_behind(qwen: Renderers) -> None:
    data = image_files()["jpeg, cmyk"]
    qwen.forget()
    one, other = (asyncio.ensure_future(qwen.door_prompt([unopened(data)])) for _ in range(2))
    await until(lambda: bool(qwen.door._items._flights))
    one.cancel()
    assert (await other).differs(await qwen.stock_prompt([opened(data)])) == ""
    assert qwen.door._items._flights == {}


@pytest.mark.parametrize("as_ids", [False, True], ids=["text", "ids"])
async def test_raw_prompts_of_a_thread_are_rendered_as_by_vllm(qwen: Renderers, as_ids: bool) -> None:
    """As `AsyncLLM.generate` and `LLM.generate` call it, with images that the caller has decoded."""
    qwen.forget()
    text = "<|vision_start|><|image_pad|><|vision_end|>What?"
    start = {"prompt_token_ids": qwen.stock.tokenizer.encode(text)} if as_ids else {"prompt": text}
    for image in (photo(31), photo(32, mode="RGBA"), photo(33, mode="P"), np.asarray(photo(34))):
        before = COUNTS["preprocessed"]
        made = [
            await asyncio.to_thread(one.render_cmpl, [{**start, "multi_modal_data": {"image": image}}])
            for one in (qwen.stock, qwen.door)
        ]
        stock, ours = (Made.from_prompt(prompt) for (prompt,) in made)
        assert (ours.differs(stock), ours.hashes) == ("", stock.hashes)
        assert COUNTS["preprocessed"] - before == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"mm_processor_cache_gb": 0, "enable_prefix_caching": False},
        {"renderer_num_workers": 4, "mm_processor_kwargs": {"max_pixels": 28 * 28 * 4}},
    ],
    ids=["no cache, no hashes", "threads, options"],
)
async def test_other_configurations_are_rendered_as_by_vllm(tiny: Folder, settings: dict[str, Any]) -> None:
    data, other = image_files()["png"], image_files()["jpeg, turned"]
    with renderers("qwen2-vl", tiny("qwen2-vl"), **settings) as both:
        for items in ([data], [data, other, data]):
            ours = await both.door_prompt([unopened(one) for one in items])
            assert ours.differs(await both.stock_prompt([opened(one) for one in items])) == ""
        for mode in ("L", None):  # vLLM treats an image that is not RGB in another way if it has no cache
            deep = image_files()["png, rgba"]
            stock = await both.stock_prompt([opened(deep, image_mode=mode)])
            assert (await both.door_prompt([unopened(deep, image_mode=mode)])).differs(stock) == ""


async def test_vllms_cache_in_shared_memory_gets_the_same_items(
    qwen: Renderers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted into the renderer: two caches of that kind cannot be in one process."""
    cache = ShmObjectStoreSenderCache(qwen.door.config)
    monkeypatch.setattr(qwen.door, "_mm_processor_cache", cache)
    data = image_files()["png"]
    qwen.stock._mm_processor_cache.clear_cache()
    try:
        ours, stock = await qwen.door_prompt([unopened(data)]), await qwen.stock_prompt([opened(data)])
        assert (ours.token_ids, ours.places) == (stock.token_ids, stock.places)
        (handle,), (item,) = ours.items["image"], stock.items["image"]
        assert handle is not None
        assert item is not None
        stored = cache._shm_cache.get(handle["address"], handle["monotonic_id"])
        assert all(stored[name].data.equal(item[name]) for name in item)
        assert (await qwen.door_prompt([unopened(data)])).token_ids == stock.token_ids
    finally:
        cache.close()


async def test_options_of_a_request_and_uncached_requests_are_rendered_as_by_vllm(qwen: Renderers) -> None:
    data = image_files()["png"]
    qwen.forget()
    plain = await qwen.door_prompt([unopened(data)])
    for extras in ({"mm_processor_kwargs": {"max_pixels": 28 * 28 * 4}}, {"skip_mm_cache": True}):
        ours = await qwen.door_prompt([unopened(data)], **extras)
        assert ours.differs(await qwen.stock_prompt([opened(data)], **extras)) == ""
    small = await qwen.door_prompt([unopened(data)], mm_processor_kwargs={"max_pixels": 28 * 28 * 4})
    assert len(small.token_ids) < len(plain.token_ids)  # the control


@pytest.mark.parametrize("family", ["qwen2-audio", "qwen3-vl"])
async def test_chats_of_other_families_are_rendered_as_by_vllm(tiny: Folder, family: str) -> None:
    """Images, clips and videos; with two of a kind, and one of each."""
    with renderers(family, tiny(family)) as both:
        limits = {
            name: min(limit or 2, 2) for name, limit in both.stock.mm_processor.info.allowed_mm_limits.items() if limit
        }
        compared = 0
        for kind, chat in kinds_of_chats(limits):
            if kind == "text":
                continue
            stock, ours = await both.chats(chat)
            assert (ours.differs(stock), ours.hashes) == ("", stock.hashes), kind
            compared += 1
        assert compared
        made = await asyncio.wrap_future(both.door._items.start())
        assert made == limits.keys()


class Batch(OfflineInferenceMixin):  # type: ignore[misc]
    """`LLM` without an engine: what would be added to it, in order."""

    def __init__(self, renderer: Any) -> None:
        self.renderer = renderer
        self.llm_engine = SimpleNamespace(abort_request=lambda *_, **__: None)
        self.added: list[Made] = []
        self.running: list[int] = []

    def _add_request(self, prompt: Any, *_: Any, **__: Any) -> str:
        self.running.append(len(self.renderer._items._flights) if hasattr(self.renderer, "_items") else 0)
        self.added.append(Made.from_prompt(prompt))
        return str(len(self.added))

    def _resolve_mm_lora(self, _: Any, lora_request: Any) -> Any:
        return lora_request

    def render(self, prompts: list[Any]) -> list[Made]:
        rendered = (self.renderer.render_cmpl([dict(prompt)])[0] for prompt in prompts)
        self._render_and_add_requests(rendered, [None] * len(prompts))
        return self.added


def test_a_batch_of_llm_is_rendered_ahead_and_added_in_order(qwen: Renderers) -> None:
    """New, known and equal images: those that the engine gets with a prompt, it gets from vLLM with the same one."""
    qwen.forget()
    text = "<|vision_start|><|image_pad|><|vision_end|>What?"
    images = [photo(seed % 9, 90 + 10 * (seed % 9), 60) for seed in range(24)]
    prompts = [{"prompt": text, "multi_modal_data": {"image": image}} for image in images]
    ours, stock = Batch(qwen.door), Batch(qwen.stock)
    for mine, its in zip(ours.render(prompts), stock.render(prompts), strict=True):
        assert (mine.differs(its), mine.hashes) == ("", its.hashes)
    assert max(ours.running) > 0, "items of later prompts are made meanwhile"
    assert qwen.door._items._flights == {}


def test_a_batch_with_a_refused_item_fails_as_with_vllm_and_leaves_nothing(qwen: Renderers) -> None:
    qwen.forget()
    text = "<|vision_start|><|image_pad|><|vision_end|>What?"
    images = [photo(1), unopened(damaged_files()["text"]), photo(2), photo(3)]
    with pytest.raises(ValueError, match="cannot identify image file"):
        Batch(qwen.door).render([{"prompt": text, "multi_modal_data": {"image": image}} for image in images])
    assert qwen.door._items._flights == {}
    assert len(Batch(qwen.door).render([{"prompt": text, "multi_modal_data": {"image": photo(3)}}])) == 1


async def test_without_a_pool_vllm_preprocesses_by_itself_with_one_line(
    tiny: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: Any, **__: Any) -> Pool:
        raise OSError("no process can be started")

    monkeypatch.setattr(Pool, "start", broken)
    data = image_files()["png"]
    lines: list[str] = []
    monkeypatch.setattr("semel.vllm_plugin.pool_items.logger.warning", lambda text, *a: lines.append(text % a))
    with renderers("qwen2-vl", tiny("qwen2-vl")) as both:
        for _ in range(2):
            assert (await both.door_prompt([opened(data)])).differs(await both.stock_prompt([opened(data)])) == ""
    assert lines == ["semel: the renderer is off, and vLLM preprocesses by itself: no process can be started"]


def test_another_products_renderer_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RENDERER_REGISTRY.renderers, "hf", ("other", "Renderer"))
    with pytest.raises(LevelOff, match=r"other\.Renderer is the renderer already"):
        renderer.install()
    assert RENDERER_REGISTRY.renderers["hf"] == ("other", "Renderer")


def test_a_vllm_with_other_code_leaves_the_level_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BaseRenderer, "_process_multimodal", lambda self: self)
    with pytest.raises(LevelOff, match="_process_multimodal is not as it was tested"):
        renderer.install()
    assert RENDERER_REGISTRY.renderers["hf"] == ("vllm.renderers.hf", "HfRenderer")


def test_api_servers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert [num_processes(servers) for servers in (1, 2, 4, 16)] == [7, 3, 1, 1]
