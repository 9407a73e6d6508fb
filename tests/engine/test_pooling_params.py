"""What semel reads of a model that pools, and what it gives to vLLM for one: without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from semel.core import PoolingModel
from semel.engine.vllm.plugins.pooling_failures import failure_reason, fill_failures
from semel.engine.vllm.requests.pooling import describe_pooling, pooling_params
from semel.errors import ConfigError, InvalidRequest


def config(task: str | None, *, runner: str = "pooling", **hf: Any) -> Any:
    from vllm.config import PoolerConfig

    return SimpleNamespace(
        runner_type=runner,
        pooler_config=PoolerConfig(seq_pooling_type="LAST", use_activation=False),
        hf_config=SimpleNamespace(**hf),
        get_pooling_task=lambda _: task,
        use_sep_token=True,
    )


def test_a_model_that_generates_pools_nothing(tmp_path: Path) -> None:
    assert describe_pooling(config(None, runner="generate"), ("generate",), tmp_path) is None


def test_an_embedding_model_has_the_instructions_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "Find: ", "x": 1}}))
    found = describe_pooling(config("embed"), ("embed", "token_embed"), tmp_path)
    assert found == PoolingModel(
        "embed",
        ("embed", "token_embed"),
        scores=True,
        instructions={"query": "Find: "},
        config={"seq_pooling_type": "LAST", "use_activation": False, **defaults()},
    )
    own = describe_pooling(config("embed", task_instructions={"document": "Doc: "}), ("embed",), tmp_path)
    assert own is not None
    assert own.instructions == {"document": "Doc: "}


def defaults() -> dict[str, object]:
    from vllm.config import PoolerConfig

    plain = PoolerConfig()
    names = ("enable_chunked_processing", "enable_flash_late_interaction")
    return {name: getattr(plain, name) for name in names if hasattr(plain, name)}


@pytest.mark.parametrize("labels", [1, 3])
def test_a_classifier_has_names_and_does_not_score(tmp_path: Path, labels: int) -> None:
    found = describe_pooling(config("classify", num_labels=labels, id2label={0: "no"}), ("classify",), tmp_path)
    assert found is not None
    assert (found.labels, found.scores) == (("no", *[None] * (labels - 1)), False)


def test_a_task_that_semel_does_not_serve_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'plugin'"):
        describe_pooling(config("plugin"), ("plugin",), tmp_path)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ({"task": "embed", "extra_kwargs": {}}, "extra_kwargs: not of a model that pools"),
        ({"task": "embed", "max_tokens": 1, "n": 2}, "max_tokens, n: not of a model that pools"),
        ({"task": "generate"}, "'generate'"),
        ({"task": "embed", "dimensions": "many"}, "Expected `int"),
        ({"task": "score"}, "score"),
    ],
)
def test_parameters_that_the_engine_core_would_not_take_are_refused(sent: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        pooling_params(sent)
    params = pooling_params({"task": "embed", "dimensions": 8, "use_activation": False})  # the control
    assert (params.task, params.dimensions, params.use_activation) == ("embed", 8, False)


def test_a_failed_request_has_its_reason_in_the_place_of_its_vector() -> None:
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    failed = EngineCoreOutput("a", [], finish_reason=FinishReason.ERROR, stop_reason="semel-encoder:…")
    unnamed = EngineCoreOutput("b", [], finish_reason=FinishReason.ERROR)
    pooled = EngineCoreOutput("c", [], finish_reason=FinishReason.STOP, pooling_output=torch.ones(3))
    fill_failures({0: SimpleNamespace(outputs=[failed, unnamed, pooled])})
    reasons = [failure_reason(output.pooling_output) for output in (failed, unnamed, pooled)]
    assert reasons == ["semel-encoder:…", "failed", None]


def test_vllms_output_processor_outlives_a_failure_only_with_an_output() -> None:
    from vllm.pooling_params import PoolingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
    from vllm.v1.engine.output_processor import OutputProcessor

    def outcome(*, filled: bool) -> Any:
        processor = OutputProcessor(None, log_stats=False)
        request = EngineCoreRequest(
            request_id="a",
            external_req_id="a",
            prompt_token_ids=[1],
            mm_features=None,
            sampling_params=None,
            pooling_params=PoolingParams(task="embed"),
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        processor.add_request(request, None)
        failed = EngineCoreOutput("a", [], finish_reason=FinishReason.ERROR, stop_reason="why")
        if filled:
            fill_failures({0: SimpleNamespace(outputs=[failed])})
        return processor.process_outputs([failed]).request_outputs[0]

    assert failure_reason(outcome(filled=True).outputs.data) == "why"
    with pytest.raises(AssertionError):  # the control: of this, AsyncLLM ends all requests
        outcome(filled=False)
