"""What a worker refuses before its engine loads, and whose fault an error at vLLM's door is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from semel.engine.vllm.arguments import check_parallel, check_planning, check_runner, create_config
from semel.engine.vllm.requests import sampling
from semel.engine.vllm.requests.sampling import Defaults, refusals, sampling_params
from semel.errors import ConfigError, InvalidRequest, ServiceError

pytestmark = pytest.mark.engine  # they import vLLM; none starts it

DEFAULTS = Defaults({}, max_context=1_000, max_answer=None)


class Arguments(SimpleNamespace):
    """vLLM's `AsyncEngineArgs`, as far as they are looked at."""

    def __init__(self, config: Callable[[], Any] = lambda: None, *, size: int = 1, rank: int | None = None) -> None:
        super().__init__(data_parallel_size=size, data_parallel_rank=rank, config=config)

    def create_engine_config(self, _: object) -> Any:
        return self.config()


def test_an_engine_that_neither_generates_nor_pools_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"as a draft model, .* start with --runner generate or --runner pooling"):
        check_runner("draft")
    for runner in ("auto", "generate", "pooling"):  # the control
        check_runner(runner)


@pytest.mark.parametrize(
    ("runner", "pooler", "said"),
    [
        ("draft", None, "has no routes for that"),
        ("pooling", SimpleNamespace(enable_chunked_processing=True), "enable_chunked_processing is not served"),
    ],
)
def test_a_model_that_vllm_itself_runs_otherwise_is_refused(runner: str, pooler: object, said: str) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(runner_type=runner, pooler_config=pooler),
        ec_manager_config=SimpleNamespace(manager_config={}),
        ec_transfer_config=None,
        lora_config=None,
        scheduler_config=SimpleNamespace(encoder_cache_size=8_192),
    )
    with pytest.raises(ConfigError, match=said):
        create_config(Arguments(lambda: config))
    config.model_config.runner_type = "generate"  # the control
    assert create_config(Arguments(lambda: config)) is config


def test_several_engines_in_one_worker_are_refused_with_advice_that_can_be_followed() -> None:
    with pytest.raises(ConfigError) as caught:
        check_parallel(Arguments(size=2))
    assert "--data-parallel-size 2 in one worker" in str(caught.value)
    assert "For a dense model start one worker for each replica, without any --data-parallel flag" in str(caught.value)
    for rightly in (Arguments(), Arguments(size=2, rank=1)):  # the control
        check_parallel(rightly)


def test_a_rank_of_a_dense_model_is_refused_with_the_same_advice() -> None:
    def refuse() -> None:
        raise ValueError("Non-MoE models do not support external data parallel mode.")

    with pytest.raises(ConfigError) as caught:
        create_config(Arguments(refuse, size=2, rank=1))
    assert "Non-MoE models do not support external data parallel mode." in str(caught.value)
    assert "without any --data-parallel flag" in str(caught.value)
    with pytest.raises(ConfigError) as caught:  # the control: others need no such advice
        create_config(Arguments(refuse))
    assert "data-parallel" not in str(caught.value)


def test_what_vllm_refuses_of_its_configuration_is_told_in_its_own_words_without_values() -> None:
    from pydantic import BaseModel, model_validator

    class Config(BaseModel):
        secret: str

        @model_validator(mode="after")
        def check(self) -> Config:
            raise ValueError("max_tokens_per_mm_item (2700) is larger")

    with pytest.raises(ConfigError) as caught:
        create_config(Arguments(lambda: Config(secret="hunter2")))
    assert str(caught.value) == "vLLM refuses its configuration: max_tokens_per_mm_item (2700) is larger"


def test_another_error_of_vllm_is_not_the_operators() -> None:
    def fail() -> None:
        raise AttributeError("a bug")

    with pytest.raises(AttributeError):
        create_config(Arguments(fail))


def test_the_encoder_is_planned_from_0_32_on() -> None:
    with pytest.raises(ConfigError, match=r"--encoder-planning needs vLLM 0\.32, and 0\.31\.0 is installed: .*leave"):
        check_planning("0.31.0")
    check_planning("0.32.1")  # the control


def test_a_call_of_ours_that_vllm_does_not_know_is_not_the_clients_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The wrong implementation answered 400, and told the truth at INFO only."""
    for error in (AttributeError("resolve_reasoning_ended"), TypeError("an unexpected keyword argument")):
        caplog.clear()
        with pytest.raises(ServiceError, match="the worker failed on this request"), refusals():
            in_semel(monkeypatch, error)
        assert [record.levelno for record in caplog.records] == [logging.ERROR]
        assert str(error) in caplog.text


def test_an_attribute_that_a_request_of_vllm_has_no_more_is_not_the_clients_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """pydantic raises it. The control: the same, in vLLM's code."""
    from pydantic import BaseModel

    class ChatCompletionRequest(BaseModel):
        model: str

    request = ChatCompletionRequest(model="tiny")
    with pytest.raises(ServiceError), refusals():
        run_in_semel(monkeypatch, "argument.resolve_reasoning_ended", request)
    with pytest.raises(InvalidRequest), refusals():
        request.resolve_reasoning_ended  # type: ignore[attr-defined] # noqa: B018 - this module is not semel's


@pytest.mark.parametrize("error", [ValueError("no"), KeyError("no"), ZeroDivisionError()])
def test_a_value_that_our_code_finds_wrong_is_the_clients_fault(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with pytest.raises(InvalidRequest), refusals():
        in_semel(monkeypatch, error)


def in_semel(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Raise it in a module of semel's."""
    run_in_semel(monkeypatch, "raise argument", error)


def run_in_semel(monkeypatch: pytest.MonkeyPatch, line: str, argument: object) -> None:
    code = compile(f"def run(argument):\n    {line}\n", "<semel>", "exec")
    monkeypatch.setattr(sampling, "run", None, raising=False)
    exec(code, vars(sampling))
    vars(sampling)["run"](argument)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": "many"},
        {"prompt_logprobs": "all"},
        {"prompt_logprobs": [1]},
    ],
)
def test_a_number_that_is_none_is_the_clients_fault(wrong: Mapping[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="check their types and ranges"), refusals():
        DEFAULTS.complete(wrong, 10)


@pytest.mark.parametrize(
    "wrong",
    [
        {"no_such_parameter": 1},
        {"repetition_detection": {"no_such_field": 1}},
        {"structured_outputs": {"json": {"type": "boolean"}, "no_such_field": 1}},
    ],
)
def test_a_field_that_vllm_does_not_know_is_the_clients_fault(wrong: Mapping[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        sampling_params(wrong)


def test_none_is_as_if_it_were_left_out() -> None:
    assert DEFAULTS.complete({"max_tokens": None, "prompt_logprobs": None}, 10)["max_tokens"] == 990


@pytest.mark.parametrize(
    ("requested", "field", "message"),
    [
        ({"temperature": 99.0}, "temperature", "temperature must be in [0, 2]"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias", "logit_bias contains"),
        ({"top_k": -5}, None, "top_k must be"),
    ],
)
def test_a_parameter_that_vllm_names_is_named_to_the_client(
    requested: dict[str, Any], field: str | None, message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        sampling_params(requested)
    assert caught.value.param == field
    assert str(caught.value).startswith(message)


def test_a_message_that_does_not_begin_with_its_parameter_gets_it_in_front() -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(InvalidRequest, match=r"^top_p: too much$") as caught, refusals():
        raise VLLMValidationError("too much", parameter="top_p", value=9)
    assert caught.value.param == "top_p"
