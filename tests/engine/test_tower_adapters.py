"""LoRA adapters that change the encoder have outputs of their own; those of the language model share the model's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from tests.engine.adapter_files import build_adapter
from tests.engine.engines import Engines, ShippedRig
from tests.engine.test_adapters import START, adapters, bare, chats, compare_answers, ours

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(900)]

TOWER: Final = replace(START, flags=(*START.flags, "--enable-tower-connector-lora"))
KINDS: Final[Mapping[str, tuple[bool, bool]]] = {
    "language": (True, False),
    "tower": (False, True),
    "both": (True, True),
}
NAMES: Final = (None, *KINDS)


@pytest.fixture(scope="module")
async def rig(engines: Engines) -> ShippedRig:
    return await engines.of(TOWER)


@pytest.fixture(scope="module")
async def folders(rig: ShippedRig, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """One of each kind, loaded."""
    root = tmp_path_factory.mktemp("adapters")
    made = {
        name: build_adapter(rig.folder, root / name, seed, language=language, tower=tower)
        for seed, (name, (language, tower)) in enumerate(KINDS.items())
    }
    for name, folder in made.items():
        await adapters(rig).load(name, str(folder))
    return made


async def encoded(rig: ShippedRig) -> int:
    """How many items the encoder has encoded."""
    totals = await rig.totals()
    return totals.queries - totals.hits


async def test_answers_are_those_of_bare_vllm_one_at_a_time_and_mixed_in_a_batch(
    rig: ShippedRig, folders: Mapping[str, Path]
) -> None:
    await compare_answers(rig, folders)


async def test_an_adapter_of_the_encoder_has_outputs_of_its_own_and_one_of_the_language_model_has_none(
    rig: ShippedRig, folders: Mapping[str, Path]
) -> None:
    """The control is vLLM's own rule, under which each adapter encodes anew."""
    (chat,) = chats(2, 3)[2:]
    images = str(chat).count("'image_url': {")
    await rig.engine.reset()
    found: dict[str | None, list[int]] = {}
    for name in (*NAMES, *NAMES):
        before = await encoded(rig)
        await ours(rig, chat, name)
        found.setdefault(name, []).append(await encoded(rig) - before)
    assert found == {None: [images, 0], "language": [0, 0], "tower": [images, 0], "both": [images, 0]}
    await rig.engine.reset()
    adapters(rig)._for_language_only.clear()
    before = await encoded(rig)
    await ours(rig, chat, None)
    await ours(rig, chat, "language")
    assert await encoded(rig) - before == 2 * images


async def test_other_weights_under_a_name_do_not_get_the_outputs_of_those_before(
    rig: ShippedRig, folders: Mapping[str, Path], tmp_path: Path
) -> None:
    chat = chats(3, 3)[2]
    await rig.engine.reset()
    first = await ours(rig, chat, "tower")
    other = build_adapter(rig.folder, tmp_path / "other", 9, language=False, tower=True)
    await adapters(rig).load("tower", str(other), in_place=True)
    second = await ours(rig, chat, "tower")
    assert second.token_ids == (await bare(rig, chat, other)).token_ids
    assert first.token_ids != second.token_ids


async def test_mutant_an_adapter_of_the_encoder_that_is_taken_for_one_of_the_language_model_answers_otherwise(
    rig: ShippedRig, folders: Mapping[str, Path]
) -> None:
    chat = chats(4, 3)[2]
    await rig.engine.reset()
    right = await ours(rig, chat, "both")
    await rig.engine.reset()
    adapters(rig)._for_language_only.add(adapters(rig).request("both").lora_name)
    await ours(rig, chat, None)
    assert (await ours(rig, chat, "both")).token_ids != right.token_ids
