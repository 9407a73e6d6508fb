"""Parts of the engine in plain vLLM's configuration: where nobody named others, and only where they can work."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from semel.engine.vllm.arguments import parse_engine_flags
from semel.engine.vllm.compat.internals import ENCODER_CACHE, LAZY_TRANSFER_WORKER, PLAIN_SCHEDULER, SCHEDULER
from semel.engine.vllm.tier.config import TIER
from semel.errors import ConfigError
from semel.vllm_plugin import engine_parts, levels
from semel.vllm_plugin.engine_parts import create_engine_config
from tests.vllm_plugin.fake_core import engine_arguments

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

OURS = (ENCODER_CACHE, PLAIN_SCHEDULER, LAZY_TRANSFER_WORKER)
FIELDS = ("ec_manager_config", "scheduler_cls", "worker_cls", "ec_transfer_config")

PLAIN = dict.fromkeys((*FIELDS, "data_parallel_rank")) | {
    "worker_cls": "auto",
    "runner": "auto",
    "_api_process_count": 1,
    "data_parallel_size": 1,
}


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What an operator reads."""
    said: list[str] = []
    monkeypatch.delenv("SEMEL_TIER_GB", raising=False)
    monkeypatch.setattr(levels.logger, "info", lambda line, *args: said.append(line % args))
    return said


def created(arguments: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    given = [getattr(arguments, name) for name in FIELDS]
    config = create_engine_config(EngineArgs.create_engine_config, arguments)
    assert [getattr(arguments, name) for name in FIELDS] == given  # the user's own are as they were
    return config


def parts(config: Any) -> tuple[Any, Any, Any]:
    manager, scheduler = config.ec_manager_config, config.scheduler_config.scheduler_cls
    return manager.encoder_cache_manager_cls, scheduler, config.parallel_config.worker_cls


def test_all_parts_are_on_by_default_and_a_line_says_so(tiny: Callable[[str], Path], lines: list[str]) -> None:
    assert parts(created(engine_arguments(tiny("qwen2-vl")))) == OURS
    assert lines == ["semel: engine parts: encoder cache, late transfer, guard, encoder metrics"]


@pytest.mark.parametrize(
    ("flag", "left"),
    [
        ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, {ENCODER_CACHE}),
        ({"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"}, {ENCODER_CACHE}),
        (
            {"ec_manager_config": {"encoder_cache_manager_cls": "their.Manager"}},
            {PLAIN_SCHEDULER, LAZY_TRANSFER_WORKER},
        ),
    ],
)
def test_what_the_user_has_named_is_left_alone(
    tiny: Callable[[str], Path], lines: list[str], flag: dict[str, Any], left: set[str]
) -> None:
    config = created(engine_arguments(tiny("qwen2-vl"), **flag))
    assert {part for part in parts(config) if part in OURS} == left
    (name,) = flag
    assert lines[-1].endswith(f"; off: --{name.replace('_', '-')} names another")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"runner": "pooling"}, "a pooling model"),
        ({"data_parallel_size": 2}, "data parallel inside one server"),
        ({"scheduler_cls": SCHEDULER}, "names one of semel's already"),
        (
            {"ec_transfer_config": {"ec_connector": "ECExampleConnector", "ec_role": "ec_consumer"}},
            "--ec-transfer-config names a connector",
        ),
    ],
)
def test_where_they_cannot_work_vllm_makes_its_configuration_alone(
    lines: list[str], flags: dict[str, Any], reason: str
) -> None:
    seen: list[list[Any]] = []

    def own(arguments: Any) -> str:
        seen.append([getattr(arguments, name) for name in FIELDS])
        return "vLLM's"

    arguments = SimpleNamespace(**{**PLAIN, **flags})
    before = [getattr(arguments, name) for name in FIELDS]
    assert create_engine_config(own, arguments) == "vLLM's"
    assert seen == [before]
    assert lines[-1].startswith("semel: engine parts are off: ")
    assert reason in lines[-1]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"supports_multimodal_inputs": False}, "a model of text only"),
        ({"runner_type": "pooling"}, "a pooling model"),
        ({"diffusion_config": object()}, "a diffusion model"),
    ],
)
def test_vllm_makes_its_configuration_again_of_the_arguments_as_they_were(
    lines: list[str], monkeypatch: pytest.MonkeyPatch, model: dict[str, Any], reason: str
) -> None:
    monkeypatch.setenv("SEMEL_TIER_GB", "much")  # costs one more try
    seen: list[str] = []

    def own(arguments: Any) -> Any:
        assert "target" not in arguments.speculative_config["nested"]
        seen.append(repr({name: value for name, value in vars(arguments).items() if name not in FIELDS}))
        arguments.speculative_config["nested"]["target"] = "vLLM's own"
        arguments.additional_config["backend"] = arguments.model = "changed"
        arguments.data_parallel_rank, arguments.added = 0, "by vLLM"
        found = SimpleNamespace(**{"runner_type": "generate", "supports_multimodal_inputs": True} | model)
        return SimpleNamespace(
            model_config=found, ec_transfer_config=None, diffusion_config=model.get("diffusion_config")
        )

    drafts = {"method": "ngram", "nested": {}}
    arguments = SimpleNamespace(**PLAIN, model="a", speculative_config=drafts, additional_config={})
    create_engine_config(own, arguments)
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert lines == [f"semel: engine parts are off: {reason}"]


def test_a_model_of_text_with_drafts_starts_as_without_semel(tmp_path: Path, lines: list[str]) -> None:
    """In vLLM's own words; the control is vLLM's function, which cannot be called twice with the same arguments."""
    from transformers import Qwen2Config
    from vllm.engine.arg_utils import EngineArgs

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 128}
    Qwen2Config(
        **sizes, num_attention_heads=2, num_key_value_heads=2, architectures=["Qwen2ForCausalLM"]
    ).save_pretrained(tmp_path)

    def arguments() -> Any:
        return engine_arguments(tmp_path, skip_tokenizer_init=True, spec_method="ngram", spec_tokens=3)

    assert created(arguments()).speculative_config.num_speculative_tokens == 3
    assert lines == ["semel: engine parts are off: a model of text only"]
    plain = arguments()
    EngineArgs.create_engine_config(plain)
    with pytest.raises(ValueError, match="spec"):
        EngineArgs.create_engine_config(plain)


def test_flags_that_vllm_refuses_are_refused_as_without_semel(tiny: Callable[[str], Path], lines: list[str]) -> None:
    with pytest.raises(ValueError, match="max_model_len"):
        created(engine_arguments(tiny("qwen2-vl"), max_model_len=10_000_000))
    assert lines == []


def test_a_fault_of_our_own_leaves_vllm_as_it_is(
    tiny: Callable[[str], Path], lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("planted")

    monkeypatch.setattr(engine_parts, "_check", fail)
    config = created(engine_arguments(tiny("qwen2-vl")))
    assert not {*parts(config)} & {*OURS}
    assert lines == ["semel: engine parts are off: OSError: planted"]


def test_a_host_tier_is_added_with_its_variable_and_a_wrong_one_costs_only_the_tier(
    tiny: Callable[[str], Path], lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEMEL_TIER_GB", "0.25")
    connector = created(engine_arguments(tiny("qwen2-vl"))).ec_transfer_config
    assert (connector.ec_connector, connector.ec_connector_extra_config["ec_cpu_bytes"]) == (TIER, 2**28)
    assert "host tier of 0.25 GiB" in lines[-1]
    monkeypatch.setenv("SEMEL_TIER_GB", "much")
    config = created(engine_arguments(tiny("qwen2-vl")))
    assert (config.ec_transfer_config, parts(config)) == (None, OURS)
    assert "; off: SEMEL_TIER_GB: ValueError" in lines[-1]
    monkeypatch.setenv("SEMEL_TIER_GB", "0.25")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    arguments = SimpleNamespace(**PLAIN)
    with pytest.raises(ConfigError, match="Ray"):
        engine_parts._add_tier(arguments)


def test_a_worker_of_semels_with_the_variable_set_keeps_what_its_own_flags_say(
    tiny: Callable[[str], Path], lines: list[str]
) -> None:
    flags = ["--enforce-eager", "--dtype", "float32", "--max-model-len", "2048"]
    arguments = parse_engine_flags(str(tiny("qwen2-vl")), flags, ship_resident_items=True, metrics="/proc/self/fd/0")
    config = created(arguments)
    assert config.ec_manager_config.manager_config == {"metrics": "/proc/self/fd/0"}
    assert config.parallel_config.worker_cls != LAZY_TRANSFER_WORKER
    assert "names one of semel's already" in lines[-1]


def test_the_hook_is_there_once_however_often_vllm_loads_its_plug_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

    own = EngineArgs.create_engine_config
    monkeypatch.setattr(EngineArgs, "create_engine_config", own)
    first = (engine_parts.install(), EngineArgs.create_engine_config)
    assert (engine_parts.install(), AsyncEngineArgs.create_engine_config) == first
    assert first[1].__wrapped__ is own
