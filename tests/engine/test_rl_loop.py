"""The loop of `tools.engine.rl_loop` without an engine: what it asks for, and what is a fault."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tools.engine import rl_loop
from tools.engine.rl_loop import Driver, Loop, faults_of, pick
from tools.engine.rl_served import ServedLoop, faults_of_served


class Engine:
    """Answers at once; what a pause finds running it aborts. It fails the request of a number, if one is named."""

    def __init__(self, failing: int = -1) -> None:
        self.asked: Counter[str] = Counter()
        self.failing = failing
        self.renderer = self
        self.paused = 0
        self.raw_pixels: Counter[bytes] = Counter()

    async def render_chat_async(self, chats: list[Any], _: object) -> tuple[list[Any], list[Any]]:
        await asyncio.sleep(0)
        return [], [{"chat": chats[0]}]

    async def generate(self, prompt: dict[str, Any], params: Any, _: str) -> AsyncIterator[Any]:
        self.asked["chat" if "chat" in prompt else f"raw n={params.n}"] += 1
        if "multi_modal_data" in prompt:
            self.raw_pixels[prompt["multi_modal_data"]["image"].tobytes()] += 1
        if self.asked.total() - 1 == self.failing:
            raise RuntimeError("lost")
        reason = "length" if params.max_tokens < 100 else "abort"
        for index in range(params.n):
            yield SimpleNamespace(outputs=[SimpleNamespace(index=index, finish_reason=reason)])

    async def pause_generation(self) -> None:
        self.paused += 1

    async def resume_generation(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the two values of vLLM's that the driver makes: importing vLLM takes ten seconds."""
    for name in ("vllm", "vllm.sampling_params", "vllm.renderers", "vllm.renderers.params"):
        module = ModuleType(name)
        vars(module).update(SamplingParams=SimpleNamespace, ChatParams=SimpleNamespace)
        monkeypatch.setitem(sys.modules, name, module)


async def test_a_step_samples_in_three_ways_and_pauses_while_some_run() -> None:
    engine, loop = Engine(), Loop(6)
    await Driver(engine, loop, 4).step(pick(6), left=2)
    assert engine.asked == {"raw n=4": 2, "raw n=1": 2 * 4 + 2, "chat": 2 * 4}
    assert (loop.samples, loop.failures, engine.paused) == (6 * 4 + 2, [], 1)


async def test_no_sample_is_left_of_an_image_that_was_a_chat_and_so_has_another_hash() -> None:
    images, engine = pick(3), Engine()
    drawn = [image.pixels.tobytes() for image in images]
    await Driver(engine, Loop(3), 1).step(images)
    assert engine.raw_pixels == {drawn[0]: 2, drawn[1]: 2}


async def test_a_sample_that_fails_is_counted_with_its_words() -> None:
    loop = Loop(3)
    await Driver(Engine(failing=2), loop, 4).step(pick(3))
    assert loop.failures == ["RuntimeError: lost"]


@pytest.mark.parametrize("faults", [[], ["61 decodes instead of 60"]])
def test_the_program_fails_with_its_faults_and_only_then(monkeypatch: pytest.MonkeyPatch, faults: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["rl_loop"])
    monkeypatch.setattr(rl_loop, "compare", lambda *_: faults)
    monkeypatch.setattr(rl_loop, "serve", lambda *_: [])
    with pytest.raises(SystemExit) as ended:
        rl_loop.main()
    assert ended.value.code == ("\n".join(faults) if faults else 0)


def test_a_second_decode_or_preprocessing_of_an_image_is_a_fault_and_so_is_none() -> None:
    assert faults_of(Loop(60, 40, 60)) == []
    assert faults_of(Loop(60, 61, 60)) == ["61 decodes instead of 60"]
    assert faults_of(Loop(60, 60, 61)) == ["61 preprocessings instead of 60"]
    assert faults_of(Loop(60, 0, 0)) == ["0 preprocessings instead of 60"]
    assert faults_of(Loop(60, 60, 60, failures=["lost"])) == ["1 samples failed: lost"]


def test_through_a_server_an_image_is_decoded_once_and_encoded_once_in_each_step() -> None:
    assert faults_of_served(ServedLoop(20, 3, 20, 20, 60)) == []
    assert faults_of_served(ServedLoop(20, 3, 21, 40, 20)) == [
        "21 decodes instead of 20",
        "40 preprocessings instead of 20",
        "20 encodes instead of 60",
    ]
    assert faults_of_served(ServedLoop(20, 3, 20, 20, 60, failures=["lost"])) == ["1 samples failed: lost"]
