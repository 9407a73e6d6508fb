"""Adapters are known to vLLM by their content. No engine is started."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from semel.compose import compose_pipeline
from semel.core import AdapterChange, Key
from semel.engine.vllm.adapters import VllmAdapters, check_adapters
from semel.engine.vllm.arguments import take_adapter_flags
from semel.errors import ConfigError, EngineFailed, InvalidRequest, ModelNotFound
from semel.render import ChatRequest
from tests.conftest import Folder
from tests.engine.adapter_files import build_adapter
from tests.engine.coreless import coreless
from tests.engine.parity import draw_image, image_part, submission

pytestmark = pytest.mark.slow  # it imports vLLM


class Llm:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.added: list[Any] = []
        self.removed: list[int] = []
        self.while_loading: Any = lambda: None

    async def add_lora(self, request: Any) -> bool:
        self.while_loading()
        self.added.append(request)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        self.removed.append(lora_id)
        return True


@pytest.fixture
def llm() -> Llm:
    return Llm()


@pytest.fixture
def adapters(llm: Llm) -> VllmAdapters:
    return VllmAdapters(llm, ("tiny", "small"))


def write(folder: Path, weights: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text(weights)
    return str(folder)


async def test_other_weights_under_the_same_name_and_path_are_another_adapter_for_vllm(
    llm: Llm, adapters: VllmAdapters, tmp_path: Path
) -> None:
    """The control: under vLLM's rule, name and path, all three would be the same."""
    for weights in ("red", "blue", "red"):
        await adapters.load("sql", write(tmp_path / "sql", weights), in_place=True)
    keys = [(one.lora_name, one.lora_int_id) for one in llm.added]
    assert keys[0] == keys[2]
    assert keys[0][0] != keys[1][0]
    assert keys[0][1] != keys[1][1]
    assert len({(one.lora_name.partition(":")[0], one.lora_path) for one in llm.added}) == 1
    assert all(0 < number < 1 << 31 for _, number in keys), "vLLM's second model runner keeps them in 32 bits"
    await adapters.load("law", write(tmp_path / "law", "red"))
    assert adapters.request("law").lora_int_id not in {number for _, number in keys}


async def test_an_adapter_that_changes_while_it_is_loaded_is_not_kept(
    llm: Llm, adapters: VllmAdapters, tmp_path: Path
) -> None:
    path = write(tmp_path / "sql", "red")
    llm.while_loading = lambda: write(tmp_path / "sql", "blue")
    with pytest.raises(InvalidRequest, match="has changed"):
        await adapters.load("sql", path)
    assert (llm.removed, adapters.loaded) == ([llm.added[0].lora_int_id], ())


async def test_what_cannot_be_loaded_leaves_what_there_was_and_says_nothing_of_vllms_S7(
    llm: Llm, adapters: VllmAdapters, tmp_path: Path
) -> None:
    told: list[int] = []
    adapters.watchers.append(lambda: told.append(len(adapters.loaded)))
    path = write(tmp_path / "sql", "red")
    modules = [SimpleNamespace(name="sql", path=path, base_model_name="small", is_3d_lora_weight=False)]
    await adapters.load_modules(modules)
    assert [(one.root, one.parent) for one in adapters.loaded] == [(path, "small")]
    assert not tuple(adapters.changes), "what a command line names is no call that others follow"
    for name, where, error in (
        ("sql", path, InvalidRequest),
        ("tiny", path, InvalidRequest),
        ("", path, InvalidRequest),
        ("x" * 129, path, InvalidRequest),
        ("law", str(tmp_path / "law"), ModelNotFound),
    ):
        with pytest.raises(error):
            await adapters.load(name, where)

    def fail() -> None:
        raise ValueError("/a/secret/path")

    llm.while_loading = fail
    with pytest.raises(EngineFailed) as failure:
        await adapters.load("sql", write(tmp_path / "sql", "blue"), in_place=True)
    assert "secret" not in str(failure.value)
    with pytest.raises(ConfigError, match="--lora-modules law"):
        await adapters.load_modules(
            [SimpleNamespace(name="law", path="/no", base_model_name=None, is_3d_lora_weight=0)]
        )
    assert [one.name for one in adapters.loaded] == ["sql"]
    await adapters.unload("sql")
    with pytest.raises(ModelNotFound):
        adapters.request("sql")
    with pytest.raises(ModelNotFound):
        await adapters.unload("sql")
    assert told == [1, 0]


async def test_what_another_worker_was_asked_for_is_done_from_the_same_files_and_nothing_else(
    llm: Llm, adapters: VllmAdapters, tmp_path: Path
) -> None:
    other, path = VllmAdapters(Llm(), ("tiny",)), write(tmp_path / "sql", "red")
    await other.load("sql", path)
    (change,) = other.changes
    await adapters.follow(change)
    assert adapters.loaded == other.loaded
    assert list(adapters.changes) == [change]
    await adapters.follow(change)
    assert len(llm.added) == 1
    await other.unload("sql")
    await adapters.follow(*other.changes)
    assert adapters.loaded == ()
    await adapters.follow(change)
    assert adapters.loaded == (), "an older one changes nothing"
    hub = replace(change, name="hub", root="org/adapter")
    for wrong, error in ((replace(change, name="law", content="0" * 32), InvalidRequest), (hub, ModelNotFound)):
        with pytest.raises(error):
            await adapters.follow(wrong)
        assert adapters.loaded == ()


async def test_what_could_not_be_done_here_can_be_loaded_and_unloaded_here_later(
    llm: Llm, adapters: VllmAdapters, tmp_path: Path
) -> None:
    """The wrong implementation forgot it: its own call was older for others, and nobody could unload the adapter."""
    ahead_us = time.time_ns() // 1_000 + 600_000_000
    lost = AdapterChange("sql", ahead_us, str(tmp_path / "gone"), "1")
    with pytest.raises(ModelNotFound):
        await adapters.follow(lost)
    await adapters.unload("sql")
    (change,) = adapters.changes
    assert (change.content, change.time_us) == ("", ahead_us + 1)
    with pytest.raises(ModelNotFound):
        await adapters.unload("sql")
    await adapters.load("sql", write(tmp_path / "sql", "red"))
    (change,) = adapters.changes
    assert change.time_us == ahead_us + 2


def test_adapters_of_the_command_line_are_read_as_vllm_reads_them() -> None:
    flags = ["--x", "1", "--lora-modules", "a=/a", '{"name": "b", "path": "/b"}', "--enable-lora"]
    modules, rest = take_adapter_flags(flags)
    assert ([(one.name, one.path) for one in modules], rest) == (
        [("a", "/a"), ("b", "/b")],
        ["--x", "1", "--enable-lora"],
    )
    assert take_adapter_flags(["--enable-lora"]) == ([], ["--enable-lora"])
    for wrong in ("zzz", '{"nme": "b"}'):
        with pytest.raises(ConfigError, match="--lora-modules"):
            take_adapter_flags(["--lora-modules", wrong])


@pytest.mark.parametrize(
    ("changed", "connector", "said"),
    [
        ({"enable_tower_connector_lora": True}, "a tier", "embedding-tier"),
        ({"default_mm_loras": {"a": "b"}}, None, "modality"),
    ],
)
def test_adapters_that_would_share_what_they_change_are_refused(
    changed: dict[str, Any], connector: str | None, said: str
) -> None:
    lora = SimpleNamespace(**{"enable_tower_connector_lora": False, "default_mm_loras": None, **changed})
    with pytest.raises(ConfigError, match=said):
        check_adapters(SimpleNamespace(lora_config=lora, ec_transfer_config=connector))


def test_a_model_whose_encoder_vllm_cannot_tell_from_the_rest_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [type("Whole", (), {}), type("Split", (), {"get_mm_mapping": None})]
    monkeypatch.setattr("vllm.model_executor.model_loader.get_model_architecture", lambda _: (kinds.pop(0), ""))
    lora = SimpleNamespace(enable_tower_connector_lora=False, default_mm_loras=None)
    config = SimpleNamespace(lora_config=lora, model_config=SimpleNamespace(is_multimodal_model=True))
    with pytest.raises(ConfigError, match="where this model's encoder ends"):
        check_adapters(config)
    check_adapters(config)


@pytest.mark.parametrize("answers", [1, 2])
async def test_the_engine_core_gets_the_adapter_and_items_under_the_names_that_they_have_without_one(
    tiny: Folder, tmp_path: Path, answers: int
) -> None:
    """So prefixes are apart, and encoder outputs are not. The control: vLLM's flag for the tower renames the items."""
    folder, received = tiny("qwen2-vl"), list[Any]()
    rng = np.random.default_rng(1)
    async with coreless(folder, "--enable-lora", "--max-lora-rank", "8") as (engine, core):
        core_calls: Any = core
        core_calls.add_lora_async = core_calls.remove_lora_async = _nothing
        add = core.add_request_async

        async def add_request_async(request: Any) -> None:
            received.append(request)
            await add(request)

        engine._llm.engine_core.add_request_async = add_request_async
        assert engine.adapters is not None
        await engine.adapters.load("red", str(build_adapter(folder, tmp_path / "red", 1)))
        assert engine.contract.adapters == engine.adapters.loaded
        pipeline = compose_pipeline(folder, engine.contract.target, Key(bytes(32)))
        for content in ([image_part(draw_image(rng)), {"type": "text", "text": "hi"}], "hi"):
            rendered = await pipeline.chat(ChatRequest([{"role": "user", "content": content}]))
            for adapter in (None, "red"):
                made = submission(rendered, n=answers, temperature=0.5)
                stream = await engine.submit(replace(made, adapter=adapter, request_id=f"{adapter}-{len(received)}"))
                await stream.close()
        asked = [one for one in received if not one.abort_immediately]
        plain, red = ([one for one in asked if (one.lora_request is None) == is_plain] for is_plain in (True, False))
        assert len(plain) == len(red) == 2 * answers
        assert {one.lora_request.lora_name.partition(":")[0] for one in red} == {"red"}
        names = [{item.identifier for one in many for item in one.mm_features or ()} for many in (plain, red)]
        assert names[0] == names[1]
        assert len(names[0]) == 1
        process = engine._llm.input_processor
        process.lora_config.enable_tower_connector_lora = True
        (name,) = names[0]
        assert process._get_mm_identifier(name, red[0].lora_request) != name
        with pytest.raises(ModelNotFound):
            await engine.submit(replace(made, adapter="blue"))


async def _nothing(*_: Any) -> bool:
    return True
