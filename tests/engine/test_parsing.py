"""vLLM's parsers without its engine: what they change before, what they read afterwards, and what if they fail."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from semel.core import AnswerParsing, Digest, Output, PrefetchedOutput
from semel.engine.vllm.arguments import take_parser_flags
from semel.engine.vllm.requests import sampling
from semel.engine.vllm.requests.parsing import AnswerReader, ParserFlags, Parsers
from semel.engine.vllm.requests.sampling import Defaults, refusals, sampling_params
from semel.engine.vllm.tier.prefetch_params import set_prefetched
from semel.errors import ConfigError, InvalidRequest
from tests.serve.speaking import speaking

pytestmark = pytest.mark.slow

TOOL = {"type": "function", "function": {"name": "f", "description": None, "parameters": None}}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
HERMES = ParserFlags(tool_call_parser="hermes", enable_auto_tool_choice=True)
AUTO = AnswerParsing(tools=[TOOL], tool_choice="auto")

Parse = Callable[..., Parsers]


@pytest.fixture(scope="module")
def parse(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Parse:
    """Parsers over the tokenizer of a model that can speak of tools and reasons."""
    from transformers import AutoTokenizer

    folder = speaking(tiny("qwen2-vl"), tmp_path_factory.mktemp("models") / "speaking")
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def parsers(flags: ParserFlags = HERMES, reasoning: str = "") -> Parsers:
        names = {"model": str(folder), "served_model_name": "tiny"}
        config = SimpleNamespace(**names, hf_config=SimpleNamespace(model_type="qwen2_vl"))
        outputs = SimpleNamespace(reasoning_parser=reasoning, reasoning_parser_plugin="")
        llm = SimpleNamespace(
            model_config=config,
            renderer=SimpleNamespace(tokenizer=tokenizer),
            vllm_config=SimpleNamespace(structured_outputs_config=outputs),
        )
        return Parsers.from_llm(llm, flags)

    return parsers


def read(conversing: AnswerReader, *pieces: str, index: int = 0, finish: str = "stop") -> list[Output]:
    """What becomes of a sequence that is generated in these pieces."""
    outputs = []
    encode = conversing.parsers.tokenizer.encode
    for number, piece in enumerate(pieces, 1):
        reason = finish if number == len(pieces) else None
        output = Output(index, piece, tuple(encode(piece, add_special_tokens=False)), finish_reason=reason)
        outputs.append(conversing.read(output, [1] if number == 1 else None))
    return outputs


def said(outputs: Sequence[Output], name: str) -> str:
    return "".join((output.message or {}).get(name) or "" for output in outputs)


def test_a_call_is_read_from_a_whole_answer(parse: Parse) -> None:
    conversing = parse().begin(AUTO, {}, [1])
    assert conversing.sampling["skip_special_tokens"] is False, "or the marks of calls would be gone"
    *before, last = read(conversing, "Well. ", CALL[:20], CALL[20:])
    assert [output.message for output in before] == [None, None]
    assert last.message is not None
    (call,) = last.message["tool_calls"]
    assert (call["type"], call["function"]) == ("function", {"name": "f", "arguments": '{"a": 1}'})
    assert (last.finish_reason, last.message["content"]) == ("tool_calls", "Well. ")


def test_a_call_is_read_from_a_stream_piece_by_piece(parse: Parse) -> None:
    conversing = parse().begin(AnswerParsing(tools=[TOOL], tool_choice="auto", stream=True), {}, [1])
    outputs = read(conversing, *CALL)
    calls = [call for output in outputs for call in (output.message or {}).get("tool_calls", ())]
    assert calls[0]["function"]["name"] == "f"
    arguments = "".join(call["function"].get("arguments") or "" for call in calls)
    assert json.loads(arguments) == {"a": 1}
    assert outputs[-1].finish_reason == "tool_calls"


def test_each_sequence_has_a_parser_of_its_own(parse: Parse) -> None:
    conversing = parse().begin(AnswerParsing(tools=[TOOL], tool_choice="auto", stream=True), {"n": 2}, [1])
    middle = len(CALL) // 2
    streams: list[list[Output]] = [[], []]
    for number, piece in enumerate((CALL[:middle], CALL[middle:])):
        for index in (0, 1):
            finish = "stop" if number else None
            streams[index].append(conversing.read(Output(index, piece, (5,), finish_reason=finish), [1]))
    for outputs in streams:
        first = next(call for output in outputs for call in (output.message or {}).get("tool_calls", ()))
        assert (first["index"], first["function"]["name"]) == (0, "f")
        assert outputs[-1].finish_reason == "tool_calls"


class Counted(list[int]):
    """A prompt that counts how often it is gone through."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        super().__init__(token_ids)
        self.times = 0

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        return super().__iter__()


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_told_to_each_parser_once_however_often_the_engine_tells_it_S16(parse: Parse, stream: bool) -> None:
    """Control: a list of it for every output would be one for each of the 20."""
    prompt = Counted([1] * 100)
    conversing = parse().begin(AnswerParsing(tools=[TOOL], tool_choice="auto", stream=stream), {"n": 2}, [1])
    for number in range(10):
        for index in (0, 1):
            conversing.read(Output(index, "a", (5,), finish_reason="stop" if number == 9 else None), prompt)
    assert prompt.times == 2


@pytest.mark.parametrize("stream", [False, True])
def test_of_several_calls_only_the_first_is_told_if_no_more_are_wanted(parse: Parse, stream: bool) -> None:
    parsing = AnswerParsing(tools=[TOOL], tool_choice="auto", parallel_tool_calls=False, stream=stream)
    outputs = read(parse().begin(parsing, {}, [1]), CALL, CALL)
    names = [
        call["function"]["name"]
        for output in outputs
        for call in (output.message or {}).get("tool_calls", ())
        if call["function"].get("name")
    ]
    assert names == ["f"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_call_that_is_forced_becomes_a_grammar(parse: Parse, choice: Any) -> None:
    conversing = parse().begin(AnswerParsing(tools=[TOOL], tool_choice=choice), {"temperature": 0.5}, [1])
    params = sampling_params(conversing.sampling)
    assert "tool_call" in params.structured_outputs.structural_tag
    assert params.temperature == 0.5
    (last,) = read(conversing, CALL)
    assert last.finish_reason == ("tool_calls" if choice == "required" else "stop")


def test_reasoning_is_told_apart_counted_and_hidden_on_request(parse: Parse) -> None:
    parsers = parse(reasoning="qwen3")
    for include in (True, False):
        for stream in (True, False):
            parsing = AnswerParsing(include_reasoning=include, stream=stream)
            conversing = parsers.begin(parsing, {}, [1])
            outputs = read(conversing, "<think>", "so it", " is", "</think>", "Yes")
            assert said(outputs, "reasoning") == ("so it is" if include else "")
            assert said(outputs, "content") == "Yes"
            assert (outputs[-1].reasoning_tokens or 0) > 0
            assert conversing.engine["reasoning_ended"] is (not include)


def test_the_engine_is_told_whether_the_prompt_ends_the_reasoning(parse: Parse) -> None:
    parsers = parse(reasoning="qwen3")
    prompt = parsers.tokenizer.encode("<think>\n\n</think>\n\n")
    conversing = parsers.begin(AnswerParsing(template_kwargs={"enable_thinking": False}), {}, prompt)
    assert conversing.engine["reasoning_ended"] is True
    assert conversing.engine["reasoning_parser_kwargs"]["chat_template_kwargs"]["enable_thinking"] is False
    assert said(read(conversing, "Yes"), "content") == "Yes"


def test_without_parsers_nothing_is_read_and_calls_are_refused(parse: Parse) -> None:
    parsers = parse(ParserFlags())
    conversing = parsers.begin(AnswerParsing(), {"temperature": 0}, [1])
    assert [output.message for output in read(conversing, "a", "b")] == [None, None]
    for choice in ("auto", "required", {"type": "function", "function": {"name": "f"}}):
        with pytest.raises(InvalidRequest, match="--tool-call-parser"):
            parsers.begin(AnswerParsing(tools=[TOOL], tool_choice=choice), {}, [1])
    assert parsers.begin(AnswerParsing(tools=[TOOL], tool_choice="none"), {}, [1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_parser_that_fails_does_not_lose_the_text(
    parse: Parse, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: vLLM's own server answers 500, and the text is gone."""
    conversing = parse().begin(AnswerParsing(tools=[TOOL], tool_choice="auto", stream=stream), {}, [1])

    def fail(*_: object, **__: object) -> None:
        raise RecursionError("too deep")

    for name in ("parse", "parse_delta"):
        monkeypatch.setattr(conversing.parsers.kind, name, fail)
    with pytest.raises(RecursionError):
        conversing.parsers.create(conversing.request, {}).parse("", conversing.request)
    outputs = read(conversing, "one ", "two ", "three")
    assert said(outputs, "content") == "one two three"
    assert outputs[-1].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_parser_that_fails_does_not_show_reasoning_that_is_hidden(
    parse: Parse, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversing = parse(reasoning="qwen3").begin(AnswerParsing(include_reasoning=False, stream=stream), {}, [1])
    for name in ("parse", "parse_delta"):
        monkeypatch.setattr(conversing.parsers.kind, name, lambda *_, **__: 1 / 0)
    assert not any(output.message for output in read(conversing, "one ", "two ", "three"))


@pytest.mark.parametrize(
    "parsing",
    [
        AnswerParsing(tools=[{"type": "nonsense"}], tool_choice="auto"),
        AnswerParsing(tools=[TOOL], tool_choice="perhaps"),
        AnswerParsing(reasoning_effort="enormous"),
        AnswerParsing(response_format={"type": "json_schema"}),
        AnswerParsing(response_format={"type": "structural_tag", "format": 5}),
    ],
)
def test_what_vllm_refuses_is_the_requests_fault_S15(parse: Parse, parsing: AnswerParsing) -> None:
    with pytest.raises(InvalidRequest), refusals():
        parse().begin(parsing, {}, [1])


def test_of_what_vllm_refuses_the_value_is_not_passed_on_S7() -> None:
    """The wrong implementation passed on `str(error)`: all of a client's words once more."""
    from vllm.exceptions import VLLMValidationError

    error = VLLMValidationError("bad words have no tokens", parameter="bad_words", value=["x" * 1_000_000])
    with pytest.raises(InvalidRequest) as caught, refusals():
        raise error
    assert str(caught.value) == "bad_words: bad words have no tokens"
    assert len(str(error)) > 1_000_000
    with pytest.raises(InvalidRequest) as caught, refusals():
        raise VLLMValidationError("x" * 1_000_000)
    assert len(str(caught.value)) == 256


def test_what_the_compiler_of_a_grammar_says_is_not_passed_on_S7() -> None:
    """The wrong implementation let a client read llguidance: "Grammar error: at 1(8): invalid regex …"."""
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.structured_output.backend_guidance import validate_guidance_grammar

    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="((("))
    with pytest.raises(InvalidRequest) as caught, refusals():
        validate_guidance_grammar(params)
    assert str(caught.value) == "the engine refuses the schema or grammar: simplify it, or correct it"
    assert isinstance(caught.value.__cause__, VLLMValidationError)


def test_a_response_format_becomes_a_constraint(parse: Parse) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    conversing = parse().begin(AnswerParsing(response_format=form), {}, [1])
    assert sampling_params(conversing.sampling).structured_outputs.json == {"type": "object"}


def test_parser_flags_are_taken_out_and_the_rest_is_the_engines() -> None:
    flags = ["--dtype", "float32", "--tool_call_parser=hermes", "--enable-auto-tool-choice", "--seed", "0"]
    assert take_parser_flags(flags) == (HERMES, ["--dtype", "float32", "--seed", "0"])
    assert take_parser_flags([]) == (ParserFlags(), [])
    for wrong in (["--enable-auto-tool-choice"], ["--tool-call-parser"]):
        with pytest.raises(ConfigError, match="--tool-call-parser"):
            take_parser_flags(wrong)


def test_a_parser_that_does_not_exist_is_a_fault_of_the_configuration(parse: Parse) -> None:
    with pytest.raises(ConfigError, match="--tool-call-parser"):
        parse(ParserFlags(tool_call_parser="nonsense", enable_auto_tool_choice=True))
    with pytest.raises(ConfigError, match="--reasoning-parser"):
        parse(reasoning="nonsense")


def test_what_a_request_leaves_open_is_the_models_and_the_contexts() -> None:
    defaults = Defaults({"temperature": 0.6, "max_tokens": 50}, max_context=100, max_answer=None)
    assert defaults.complete({}, 30) == {"temperature": 0.6, "max_tokens": 50}
    assert defaults.complete({"temperature": 0}, 70) == {"temperature": 0, "max_tokens": 30}
    assert defaults.complete({"max_tokens": 90}, 70)["max_tokens"] == 30
    assert Defaults({}, max_context=100, max_answer=20).complete({"max_tokens": 90}, 30)["max_tokens"] == 20
    with pytest.raises(InvalidRequest, match="max_tokens is 101"):
        defaults.complete({"max_tokens": 101}, 30)


def test_log_probabilities_of_a_prompt_are_bounded_S18() -> None:
    defaults = Defaults({}, max_context=1_000_000, max_answer=None)
    assert defaults.complete({"prompt_logprobs": 20}, 6_000)
    with pytest.raises(InvalidRequest, match="273,000 entries"):
        defaults.complete({"prompt_logprobs": 20}, 13_000)


@pytest.mark.parametrize("sampling", [{}, {"skip_special_tokens": False}, {"spaces_between_special_tokens": False}])
def test_a_chat_that_concerns_no_parser_is_sampled_as_if_one_had_looked(parse: Parse, sampling: dict[str, Any]) -> None:
    parsers = parse(ParserFlags())
    for plain in (AnswerParsing(), AnswerParsing(stream=True, include_reasoning=False, template_kwargs={"a": 1})):
        assert not parsers.concerns(plain, sampling)
        reader = parsers.begin(plain, sampling, [1])
        assert sampling_params(reader.sampling) == sampling_params(sampling)
        assert reader.engine.keys() == {"reasoning_ended"}  # which is for structured outputs alone
        assert [output.message for output in read(reader, "a", "b")] == [None, None]


def test_all_else_concerns_the_parsers(parse: Parse) -> None:
    parsers = parse(ParserFlags())
    for parsing in (
        AUTO,
        AnswerParsing(tools=[TOOL]),
        AnswerParsing(tool_choice="required"),
        AnswerParsing(response_format={"type": "json_object"}),
        AnswerParsing(reasoning_effort="low"),
    ):
        assert parsers.concerns(parsing, {})
    assert parsers.concerns(AnswerParsing(), {"structured_outputs": {"regex": "a"}})
    assert parse(HERMES).concerns(AnswerParsing(), {})
    assert parse(ParserFlags(), "qwen3").concerns(AnswerParsing(), {})


def test_numbers_are_made_into_sampling_parameters_once_and_each_request_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control: a text, which may be one tenant's secret, is made anew for each."""
    made: list[Any] = []
    make = sampling._checked_params

    def count(given: Any) -> Any:
        made.append(given)
        return make(given)

    monkeypatch.setattr(sampling, "_checked_params", count)
    sampling._numeric_params.cache_clear()
    first, second = (sampling_params({"temperature": 0.5, "top_k": 3, "max_tokens": 9}) for _ in range(2))
    assert (first.temperature, first.top_k) == (0.5, 3)
    assert first == second
    assert len(made) == 1
    set_prefetched(first, [PrefetchedOutput(1, Digest(bytes(Digest.size)), ((0, 1),), (1, 1, "float32"), 0)])
    first.clone().update_from_generation_config({}, 7)
    again = sampling_params({"temperature": 0.5, "top_k": 3, "max_tokens": 9})
    assert again == second
    assert again.extra_args is None
    assert again.all_stop_token_ids == set()
    for _ in range(2):
        assert sampling_params({"top_k": 3, "stop": ["secret"]}).stop == ["secret"]
    assert len(made) == 3


def test_neither_the_room_for_an_answer_nor_a_seed_is_among_the_numbers_that_are_made_once() -> None:
    """Each prompt's length would fill the cache, and its times would tell another tenant about both."""
    sampling._numeric_params.cache_clear()
    same: dict[str, Any] = {"temperature": 0.5, "min_tokens": 20, "stream_interval": 16}
    for other in (
        {"max_tokens": 1_000},
        {"max_tokens": 20, "seed": None},
        {"max_tokens": 999, "seed": 7},
        {"max_tokens": 998, "seed": 0},
        {"max_tokens": 2**62, "seed": 2**62},
        {"max_tokens": 997, "seed": -1},  # none, for vLLM
        {"max_tokens": None},
        {"seed": 8, "min_tokens": 1},  # as many as vLLM sets
    ):
        made, expected = sampling_params({**same, **other}), sampling._checked_params({**same, **other})
        assert made == expected
        assert made.sampling_type == expected.sampling_type
    assert sampling._numeric_params.cache_info().currsize == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_tokens": 19}, "min_tokens must be less than or equal to max_tokens=19"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": 20.0}, "Expected `int | null`, got `float`"),
        ({"max_tokens": 20, "seed": 1.5}, "Expected `int | null`, got `float`"),
        ({"max_tokens": 20, "min_tokens": 1.5}, "Expected `int`, got `float`"),
        ({"max_tokens": 20, "min_tokens": -1}, "min_tokens must be greater than or equal to 0"),
        ({"max_tokens": 20, "min_tokens": None}, "the engine refuses the sampling parameters"),
    ],
)
def test_what_is_set_on_the_numbers_that_are_made_once_is_checked_as_vllm_does(
    wrong: dict[str, Any], message: str
) -> None:
    sampling_params({"min_tokens": 20, "max_tokens": 20})
    with pytest.raises(InvalidRequest) as caught:
        sampling_params({"min_tokens": 20, **wrong})
    assert message in str(caught.value)


def test_equal_numbers_of_other_types_are_not_taken_for_one_another() -> None:
    assert sampling_params({"top_k": 1}).top_k == 1
    for wrong in (1.5, "1", [1]):
        with pytest.raises(InvalidRequest):
            sampling_params({"top_k": wrong})
    assert sampling_params({"logprobs": True}) == sampling_params({"logprobs": 1})
    with pytest.raises(InvalidRequest):
        sampling_params({"top_k": 1.0})
