"""Items that plain vLLM's engine core has lost are sent again: real clients and renderers of vLLM, a fake core."""

from __future__ import annotations

import asyncio
import gc
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from semel.vllm_plugin import levels, repair
from semel.vllm_plugin.counters import COUNTS
from semel.vllm_plugin.levels import LevelOff
from semel.vllm_plugin.repair import Media, MediaBudget, Repair, media_bytes
from tests.vllm_plugin.fake_core import FakeCore, engine_arguments, fake_cores

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
SIDE = 56
WAYS = ("raw", "rendered")


@contextmanager
def stock() -> Iterator[pytest.MonkeyPatch]:
    """vLLM in this process without the level, and as it was again."""
    from vllm.renderers.base import BaseRenderer
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.output_processor import OutputProcessor

    with pytest.MonkeyPatch.context() as patch:
        for owner, names in (
            (BaseRenderer, ("process_for_engine", "process_for_engine_async")),
            (InputProcessor, ("process_inputs",)),
            (AsyncLLM, ("__init__", "pause_generation", "sleep")),
            (LLMEngine, ("__init__", "step")),
            (OutputProcessor, ("add_request", "abort_requests", "process_outputs")),
        ):
            for name in names:
                method = getattr(owner, name)
                patch.setattr(owner, name, method.__wrapped__ if hasattr(method, "is_hook") else method)
        yield patch


@contextmanager
def installed(**environment: str) -> Iterator[None]:
    """vLLM in this process with the level, and as it was again."""
    with stock() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        repair.install()
        yield


@dataclass
class Client:
    """A plain `AsyncLLM` in front of a core that loses items."""

    llm: Any
    core: FakeCore
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(1_000)))

    def prompt(self, *images: Image.Image) -> dict[str, Any]:
        return {"prompt": IMAGE * len(images) + "what is it ?", "multi_modal_data": {"image": list(images)}}

    async def rendered(self, prompt: dict[str, Any]) -> Any:
        (one,) = await self.llm.renderer.render_cmpl_async([prompt])
        return one

    async def ask(self, prompt: Any, *, way: str = "raw", **sampling: Any) -> list[str | None]:
        """The reasons for which all samples ended."""
        from vllm import SamplingParams

        given = await self.rendered(prompt) if way == "rendered" else prompt
        params = SamplingParams(max_tokens=1, **sampling)
        reasons: dict[int, str | None] = {}
        async for output in self.llm.generate(given, params, f"r{next(self.numbers)}", priority=3):
            reasons |= {one.index: one.finish_reason for one in output.outputs}
        return [reasons[index] for index in sorted(reasons)]

    def hashes(self) -> list[str]:
        return [feature.mm_hash for feature in self.core.sent[-1].mm_features]

    def with_data(self) -> list[list[bool]]:
        """Of all requests with items that were sent, which of these came with data."""
        sent = [request.mm_features for request in self.core.sent]
        return [[feature.data is not None for feature in features] for features in sent]


@asynccontextmanager
async def running(folder: Path, **arguments: Any) -> AsyncIterator[Client]:
    from vllm.v1.engine.async_llm import AsyncLLM

    with fake_cores() as cores:
        llm = AsyncLLM.from_engine_args(engine_arguments(folder, **arguments))
    try:
        yield Client(llm, cores[0])
    finally:
        llm.shutdown()


@pytest.fixture(scope="module")
async def shared(tiny: Callable[[str], Path]) -> AsyncIterator[Client]:
    with installed():
        async with running(tiny("qwen2-vl")) as client:
            yield client


@pytest.fixture
def client(shared: Client) -> Iterator[Client]:
    COUNTS.clear()
    shared.core.sent.clear()
    yield shared
    shared.core.lose = lambda _: []
    assert shared.llm.output_processor.semel_repair._flights == {}


@contextmanager
def rendering_by(client: Client) -> Iterator[Callable[..., Any]]:
    """How prompts are rendered again, which may be replaced meanwhile."""
    of_client = client.llm.output_processor.semel_repair
    renders = of_client._renders
    try:
        yield renders
    finally:
        of_client._renders = renders


def draw(number: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))


def lose_once(client: Client, *lost: list[str]) -> None:
    """Lose these items, one list with each request that comes."""
    turns = iter(lost)
    client.core.lose = lambda _: next(turns, [])


@pytest.mark.parametrize("way", WAYS)
async def test_a_lost_item_is_sent_again_and_is_the_same(client: Client, way: str) -> None:
    prompt = client.prompt(draw(1), draw(2))
    assert await client.ask(prompt, way=way) == ["length"]
    first, second = client.hashes()
    was = client.core.items._cache[second]
    lose_once(client, [second])
    client.core.sent.clear()
    assert await client.ask(prompt, way=way, logprobs=2) == ["length"]
    assert client.with_data() == [[False, False], [False, True]]
    assert client.core.items._cache[second] == was != client.core.items._cache[first]
    assert COUNTS["repaired"] == COUNTS["lost"] == 1
    before, after = client.core.sent
    for name in {*before.__struct_fields__} - {"mm_features"}:
        assert getattr(before, name) == getattr(after, name), name
    assert [one.mm_position for one in before.mm_features] == [one.mm_position for one in after.mm_features]
    assert (after.priority, after.sampling_params.logprobs) == (3, 2)


async def test_without_the_level_the_request_fails(tiny: Callable[[str], Path]) -> None:
    """The control."""
    with stock():
        async with running(tiny("qwen2-vl")) as client:
            prompt = client.prompt(draw(1))
            assert await client.ask(prompt) == ["length"]
            lose_once(client, client.hashes())
            assert await client.ask(prompt) == ["error"]


async def test_a_repair_that_sends_another_item_is_noticed(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the comparison above."""

    def swapped(self: Any, rendered: Any) -> Any:
        rendered["mm_hashes"]["image"].reverse()
        return filled(self, rendered)

    filled = repair._Flight.filled
    monkeypatch.setattr(repair._Flight, "filled", swapped)
    prompt = client.prompt(draw(3), draw(4))
    await client.ask(prompt)
    names = client.hashes()
    were = [client.core.items._cache[name] for name in names]
    lose_once(client, names)
    assert await client.ask(prompt) == ["length"]
    assert [client.core.items._cache[name] for name in names] == were[::-1] != were


async def test_all_samples_of_a_request_are_repaired_by_one_rendering(client: Client) -> None:
    prompt = client.prompt(draw(5))
    await client.ask(prompt)
    lost = client.hashes()
    rendered: list[Any] = []
    with rendering_by(client) as renders:

        async def counted(*args: Any, **kwargs: Any) -> Any:
            rendered.append(args)
            return await renders(*args, **kwargs)

        client.llm.output_processor.semel_repair._renders = counted
        lose_once(client, *[lost] * 3)
        assert await client.ask(prompt, n=3, temperature=1.0) == ["length"] * 3
    assert (COUNTS["repaired"], len(rendered)) == (3, 1)


async def test_what_is_missing_still_is_sent_with_all_items_and_then_vllms_error_stands(client: Client) -> None:
    prompt = client.prompt(draw(6), draw(7))
    await client.ask(prompt)
    first, second = client.hashes()
    client.core.sent.clear()
    lose_once(client, [first], [second])
    assert await client.ask(prompt) == ["length"]
    assert client.with_data() == [[False, False], [True, False], [True, True]]
    client.core.sent.clear()

    def take_nothing(_: Any, mm_hash: str) -> Any:
        from vllm.multimodal.cache.base import MultiModalCacheMissError

        raise MultiModalCacheMissError([mm_hash])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client.core.items, "get_and_update_item", take_nothing)
        assert await client.ask(prompt) == ["error"]
    assert len(client.core.sent) == 3
    assert await client.ask(prompt) == ["length"]


async def test_an_abort_ends_a_repair(client: Client) -> None:
    prompt = client.prompt(draw(8))
    await client.ask(prompt)
    lose_once(client, client.hashes())
    client.core.sent.clear()
    begun, ended = asyncio.Event(), asyncio.Event()
    with rendering_by(client) as renders:

        async def held(*args: Any, **kwargs: Any) -> Any:
            begun.set()
            await ended.wait()
            return await renders(*args, **kwargs)

        client.llm.output_processor.semel_repair._renders = held
        asking = asyncio.create_task(client.ask(prompt))
        await begun.wait()
        sending = list(client.llm.output_processor.semel_repair._tasks)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        ended.set()
        await asyncio.gather(*sending)
    assert (len(client.core.sent), COUNTS["repaired"]) == (1, 0)


@contextmanager
def rendering_then(client: Client, call: Callable[[], Awaitable[None]]) -> Iterator[None]:
    """Let something happen between a miss and the second sending."""
    with rendering_by(client) as renders:

        async def rendering(*args: Any, **kwargs: Any) -> Any:
            rendered = await renders(*args, **kwargs)
            await call()
            return rendered

        client.llm.output_processor.semel_repair._renders = rendering
        yield


async def test_a_request_that_is_aborted_after_its_rendering_is_not_sent(client: Client) -> None:
    prompt = client.prompt(draw(10))
    await client.ask(prompt)
    lose_once(client, client.hashes())
    client.core.sent.clear()

    async def abort() -> None:
        (request_id,) = client.llm.output_processor.request_states
        await client.llm.abort(request_id, internal=True)

    with rendering_then(client, abort):
        assert await client.ask(prompt) == ["abort"]
    await asyncio.gather(*client.llm.output_processor.semel_repair._tasks)
    assert (len(client.core.sent), COUNTS["repaired"]) == (1, 0)


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
@pytest.mark.parametrize("name", ["pause_generation", "sleep"])
async def test_a_pause_aborts_what_is_being_repaired(client: Client, name: str, mode: Any, samples: int) -> None:
    """But not with `keep`, where all requests go on afterwards."""
    prompt = client.prompt(draw(11))
    await client.ask(prompt)
    lose_once(client, *[client.hashes()] * samples)
    client.core.sent.clear()
    is_kept = mode == "keep"
    with rendering_then(client, lambda: getattr(client.llm, name)(mode=mode)):
        reasons = await client.ask(prompt, n=samples, temperature=1.0)
    assert reasons == ["length" if is_kept else "abort"] * samples
    assert len(client.core.sent) == (2 * samples if is_kept else samples)
    assert (client.llm.output_processor.request_states, client.llm.output_processor.parent_requests) == ({}, {})
    assert await client.ask(prompt) == ["length"]


async def test_a_request_that_comes_in_a_pause_is_repaired(client: Client) -> None:
    prompt = client.prompt(draw(12))
    await client.ask(prompt)
    await client.llm.pause_generation(mode="abort", clear_cache=False)
    lose_once(client, client.hashes())
    assert await client.ask(prompt) == ["length"]
    assert COUNTS["repaired"] == 1


async def test_what_vllm_cannot_fail_is_aborted(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.output_processor import OutputProcessor

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    async def rendering(*_: Any, **__: Any) -> None:
        fail()

    prompt = client.prompt(draw(13))
    await client.ask(prompt)
    lose_once(client, client.hashes())
    with rendering_by(client), monkeypatch.context() as patch:
        client.llm.output_processor.semel_repair._renders = rendering
        patch.setattr(OutputProcessor, "_update_stats_from_output", fail)
        assert await client.ask(prompt) == ["abort"]


@pytest.mark.parametrize("way", WAYS)
async def test_media_are_let_go_when_the_first_output_came(client: Client, way: str) -> None:
    from vllm import SamplingParams

    prompt = client.prompt(draw(14))
    given = await client.rendered(prompt) if way == "rendered" else prompt
    kept: list[Any] = []

    def look(_: Any) -> list[str]:
        kept.extend(live_media())
        return []

    client.core.lose = look
    outputs = client.llm.generate(given, SamplingParams(max_tokens=1), "first")
    await anext(outputs)
    assert [one.prompt["multi_modal_data"]["image"] for one in kept] == [prompt["multi_modal_data"]["image"]]
    kept.clear()
    assert live_media() == []
    await outputs.aclose()


def live_media() -> list[Media]:
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is Media]


async def test_a_request_that_vllm_refuses_keeps_no_media(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixture sees that no flight stays."""
    from vllm.v1.engine.exceptions import EngineGenerateError
    from vllm.v1.engine.output_processor import RequestState

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(RequestState, "from_new_request", refuse)
        with pytest.raises(EngineGenerateError):
            await client.ask(client.prompt(draw(15)))


async def test_a_prompt_whose_items_have_other_names_now_gets_vllms_error(client: Client) -> None:
    prompt = client.prompt(draw(16))
    await client.ask(prompt)
    lose_once(client, client.hashes())
    with rendering_by(client) as renders:

        async def renamed(*args: Any, **kwargs: Any) -> Any:
            rendered = await renders(*args, **kwargs)
            return {**rendered, "mm_hashes": {"image": ["other"]}}

        client.llm.output_processor.semel_repair._renders = renamed
        assert await client.ask(prompt) == ["error"]


async def test_a_prompt_that_cannot_be_rendered_again_gets_vllms_error(client: Client) -> None:
    prompt = client.prompt(draw(9))
    await client.ask(prompt)
    lose_once(client, client.hashes())
    rendered = await client.rendered(prompt)
    rendered["semel_media"].prompt["multi_modal_data"]["image"][0] = "gone"
    assert await client.ask(rendered) == ["error"]
    assert await client.ask(client.prompt(draw(9))) == ["length"]


async def test_over_the_limit_vllms_error_stands(tiny: Callable[[str], Path]) -> None:
    with installed(SEMEL_REPAIR_MB="0"):
        async with running(tiny("qwen2-vl")) as client:
            prompt = client.prompt(draw(1))
            await client.ask(prompt)
            lose_once(client, client.hashes())
            assert await client.ask(prompt) == ["error"]
            assert await client.ask(prompt) == ["length"]


async def test_a_fault_of_its_own_switches_it_off_and_vllm_goes_on(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("planted")

    said: list[str] = []
    monkeypatch.setattr(Repair, "take_lost", fail)
    monkeypatch.setattr(levels.logger, "exception", said.append)
    with installed():
        async with running(tiny("qwen2-vl")) as client:
            prompt = client.prompt(draw(1))
            assert await client.ask(prompt) == await client.ask(prompt) == ["length"]
            lose_once(client, client.hashes())
            assert await client.ask(prompt) == ["error"]
    assert said == ["semel: repair is off after a fault of its own; vLLM goes on as it is"]


async def test_a_text_and_a_prompt_whose_cache_is_skipped_keep_nothing(client: Client) -> None:
    assert await client.ask({"prompt": "hello"}) == ["length"]
    (one,) = await client.llm.renderer.render_cmpl_async([client.prompt(draw(1))], skip_mm_cache=True)
    assert "semel_media" not in one


def test_llm_gets_lost_items_again_between_two_steps(tiny: Callable[[str], Path]) -> None:
    from vllm import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    with installed():
        with fake_cores() as cores:
            engine = LLMEngine.from_engine_args(engine_arguments(tiny("qwen2-vl")), enable_multiprocessing=True)
        client = Client(engine, cores[0])
        reasons = []
        for number in range(3):
            engine.add_request(f"r{number}", client.prompt(draw(1)), SamplingParams(max_tokens=1))
            while engine.has_unfinished_requests():
                reasons += [one.finish_reason for output in engine.step() for one in output.outputs]
            lose_once(client, client.hashes() if number == 0 else [])
    assert reasons == ["length"] * 3
    assert client.with_data() == [[True], [False], [True], [False]]


@pytest.mark.parametrize("is_failure_handled", [True, False])
def test_llm_fails_or_sends_each_lost_request_whatever_happens_to_another(
    tiny: Callable[[str], Path], is_failure_handled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tracing, which wants statistics; and where vLLM cannot handle the failure, the other one is sent still."""
    from vllm import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.output_processor import OutputProcessor

    def trace(_: Any, output: Any, state: Any, stats: Any) -> None:
        assert stats is not None
        assert is_failure_handled or output.finish_reason.name != "ERROR"

    monkeypatch.setattr(OutputProcessor, "do_tracing", trace)
    with installed():
        with fake_cores() as cores:
            engine = LLMEngine.from_engine_args(engine_arguments(tiny("qwen2-vl")), enable_multiprocessing=True)
        engine.log_stats = engine.output_processor.log_stats = engine.output_processor.tracing_enabled = True
        client = Client(engine, cores[0])
        of_client = engine.output_processor.semel_repair
        renders = of_client._renders

        reasons: dict[str, str] = {}

        def run(*names: str) -> None:
            for name in names:
                engine.add_request(name, client.prompt(draw(1)), SamplingParams(max_tokens=1))
            while engine.has_unfinished_requests():
                reasons.update({one.request_id: one.outputs[0].finish_reason for one in engine.step()})

        run("before")
        lose_once(client, client.hashes())
        turns = iter([True, False])

        def fail_first(*args: Any, **options: Any) -> Any:
            if next(turns):
                raise RuntimeError("planted")
            return renders(*args, **options)

        of_client._renders = fail_first
        run("first", "second")
        assert not of_client._lost
    failed = {"first": "error"} if is_failure_handled else {}
    assert reasons == {"before": "length", "second": "length"} | failed


def test_the_oldest_media_go_first_and_those_that_nobody_refers_to_do_not_count() -> None:
    budget = MediaBudget(100)
    kept = [Media({"image": bytes(40)}) for _ in range(3)]
    for one in kept:
        budget.hold(one)
    assert [one.prompt is not None for one in kept] == [False, True, True]
    del kept[1:], one
    gc.collect()
    budget.hold(first := Media({"image": bytes(60)}))
    budget.hold(second := Media({"image": bytes(40)}))
    budget.hold(large := Media({"image": bytes(200)}))
    assert (first.prompt, second.prompt, large.prompt) == (None, None, None)


def test_media_are_charged_without_decoding_them() -> None:
    class Unopened(Image.Image):
        def __init__(self) -> None: ...

    from vllm.multimodal.media import MediaWithBytes

    image = Image.new("RGB", (10, 20))
    assert media_bytes({"image": [image, (np.zeros(5, np.float32), 16_000)]}) == 600 + 20
    assert media_bytes({"image": MediaWithBytes(image, bytes(30))}) == 630
    assert media_bytes({"image": MediaWithBytes(Unopened(), bytes(30))}) == 30
    assert media_bytes({"prompt_token_ids": [1, 2, 3]}) == 24


def test_a_copy_of_a_rendered_prompt_leaves_the_media_behind() -> None:
    assert pickle.loads(pickle.dumps(Media({"image": b"x"}))).prompt is None


def test_a_limit_that_is_no_number_leaves_the_level_off() -> None:
    with pytest.raises(LevelOff, match="SEMEL_REPAIR_MB=much is not a whole number"), installed(SEMEL_REPAIR_MB="much"):
        pass
