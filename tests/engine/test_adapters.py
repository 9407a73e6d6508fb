"""LoRA adapters of a real engine: answers are bare vLLM's, and the encoder does nothing again for another adapter."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from semel.engine.vllm.adapters import VllmAdapters
from semel.errors import EngineFailed, ModelNotFound
from tests.engine.adapter_files import build_adapter
from tests.engine.engines import COMMON, Engines, ShippedRig, Start
from tests.engine.parity import GREEDY, Answer, Chat, draw_image, image_part, joined, random_chat, submission

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(900)]

# More places than adapters are ever loaded: on a CPU vLLM answers requests without one by what is in the last place.
START: Final = Start(
    "qwen2-vl",
    (
        *("--enable-lora", "--max-loras", "24", "--max-cpu-loras", "24", "--max-lora-rank", "8"),
        *("--max-model-len", "4096", "--max-num-batched-tokens", "2048"),
        *("--limit-mm-per-prompt", '{"image": 4, "video": 0}'),
    ),
    common=COMMON,
)
NUMBERS: Final = itertools.count(1)


@pytest.fixture(scope="module")
async def rig(engines: Engines) -> ShippedRig:
    return await engines.of(START)


@pytest.fixture(scope="module")
async def folders(rig: ShippedRig, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Two adapters, loaded."""
    root = tmp_path_factory.mktemp("adapters")
    made = {name: build_adapter(rig.folder, root / name, seed) for seed, name in enumerate(("red", "blue"))}
    for name, folder in made.items():
        await adapters(rig).load(name, str(folder))
    return made


def adapters(rig: ShippedRig) -> VllmAdapters:
    assert rig.engine.adapters is not None
    return rig.engine.adapters


async def bare(rig: ShippedRig, chat: Chat, folder: Path | None) -> Answer:
    """What vLLM's own server would ask its engine for, under a name that nothing is cached for."""
    from vllm.lora.request import LoRARequest
    from vllm.renderers.params import ChatParams
    from vllm.sampling_params import SamplingParams

    number = 1_000 + next(NUMBERS)  # other than those of the adapters that are loaded
    lora = None if folder is None else LoRARequest(f"bare-{number}", number, str(folder))
    _, (prompt,) = await rig.llm.renderer.render_chat_async(
        [chat], ChatParams(chat_template_kwargs={"add_generation_prompt": True})
    )
    params = SamplingParams(**GREEDY)
    async for result in rig.llm.generate(prompt, params, request_id=f"bare-{number}", lora_request=lora):
        last = result.outputs[0]
    steps = tuple({token: entry.logprob for token, entry in step.items()} for step in last.logprobs)
    return Answer(tuple(last.token_ids), steps)


async def ours(rig: ShippedRig, chat: Chat, name: str | None) -> Answer:
    made: Any = replace(submission(await rig.render(chat)), adapter=name, request_id=f"ours-{next(NUMBERS)}")
    return joined([output async for output in await rig.engine.submit(made)])


def chats(seed: int, count: int) -> list[Chat]:
    rng = np.random.default_rng(seed)
    return [random_chat(rng, [image_part(draw_image(rng)) for _ in range(number % 3)]) for number in range(count)]


async def compare_answers(rig: ShippedRig, folders: Mapping[str, Path]) -> None:
    """Those of the model and of each adapter, one at a time and mixed in a batch, are bare vLLM's, and differ."""
    names = (None, *folders)
    asked = [(chat, name) for chat in chats(1, 6) for name in names]
    await rig.engine.reset()
    expected = [await bare(rig, chat, None if name is None else folders[name]) for chat, name in asked]
    await rig.engine.reset()
    assert [(await ours(rig, chat, name)).token_ids for chat, name in asked] == [one.token_ids for one in expected]
    await rig.engine.reset()
    mixed = await asyncio.gather(*(ours(rig, chat, name) for chat, name in asked))
    assert [one.token_ids for one in mixed] == [one.token_ids for one in expected]
    by_name = [[one.token_ids for one in expected[number :: len(names)]] for number in range(len(names))]
    assert all(mine != other for mine, other in itertools.combinations(by_name, 2)), "the adapters change nothing"


async def test_answers_are_those_of_bare_vllm_one_at_a_time_and_mixed_in_a_batch(
    rig: ShippedRig, folders: Mapping[str, Path]
) -> None:
    await compare_answers(rig, folders)


async def test_an_image_is_encoded_once_for_the_model_and_all_its_adapters(
    rig: ShippedRig, folders: Mapping[str, Path]
) -> None:
    (chat,) = chats(2, 3)[2:]
    await rig.engine.reset()
    await ours(rig, chat, None)
    before = await rig.totals()
    for name in folders:
        await ours(rig, chat, name)
    after = await rig.totals()
    assert after.queries - after.hits == before.queries - before.hits, "something was encoded again"
    assert after.hits - before.hits >= 2 * len(folders)


async def test_other_weights_under_a_name_that_is_loaded_again_use_no_prefix_of_those_before(
    rig: ShippedRig, folders: Mapping[str, Path], tmp_path: Path
) -> None:
    """The control: under vLLM's own name and path the old prefixes answer, and with other tokens."""
    chat = chats(3, 3)[2]
    place = tmp_path / "green"
    shutil.copytree(folders["red"], place)
    await adapters(rig).load("green", str(place))
    first = await ours(rig, chat, "green")
    assert first == await ours(rig, chat, "green")
    shutil.rmtree(place)
    shutil.copytree(folders["blue"], place)
    await adapters(rig).load("green", str(place), in_place=True)
    assert rig.engine.contract.adapters == adapters(rig).loaded
    second = await ours(rig, chat, "green")
    expected = (await bare(rig, chat, folders["red"]), await bare(rig, chat, folders["blue"]))
    assert (first.token_ids, second.token_ids) == (expected[0].token_ids, expected[1].token_ids)
    assert expected[0].token_ids != expected[1].token_ids
    await adapters(rig).unload("green")
    with pytest.raises(ModelNotFound):
        await ours(rig, chat, "green")


async def test_an_adapter_that_cannot_be_loaded_is_an_error_and_the_engine_goes_on(
    rig: ShippedRig, folders: Mapping[str, Path], tmp_path: Path
) -> None:
    too_large = build_adapter(rig.folder, tmp_path / "large", 5, rank=64)
    with pytest.raises(EngineFailed):
        await adapters(rig).load("large", str(too_large))
    with pytest.raises(ModelNotFound):
        await adapters(rig).load("none", str(tmp_path / "none"))
    assert [one.name for one in adapters(rig).loaded] == list(folders)
    assert await ours(rig, chats(4, 1)[0], "red")
