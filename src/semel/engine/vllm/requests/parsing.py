"""Tools and reasoning: vLLM's own parsers over what its engine generates, as its own chat server runs them.

A chat's request is built anew as vLLM's `ChatCompletionRequest`, without its messages, which the parsers do not read.
They may change how it is sampled (a forced call becomes a grammar, special tokens stay in the text) before it is
submitted, and read the answer afterwards, each sequence with a parser of its own. What a model says can make a parser
fail; the text is not lost by that: from there on it is sent as it is, unless its reasoning was not to be shown.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from msgspec.structs import replace

from semel.core import AnswerParsing, Output
from semel.engine.vllm.compat.parsers import (
    always_adjusts,
    count_parsed_calls,
    make_tool_call_id,
    parser_class,
    reasoning_ended,
    tell_prompt,
)
from semel.errors import ConfigError, InvalidRequest

__all__ = ["AnswerReader", "ParserFlags", "Parsers"]

_ADJUSTED: Final = ("skip_special_tokens", "spaces_between_special_tokens")
"""Sampling parameters that parsers change, in addition to the structured output."""

_NOT_AVAILABLE: Final = (
    "{choice} needs a parser of tool calls: start the worker with --enable-auto-tool-choice and --tool-call-parser, "
    "or send tool_choice none"
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ParserFlags:
    """The parsers that an engine's answers go through, under the names of vLLM's flags."""

    tool_call_parser: str | None = None
    enable_auto_tool_choice: bool = False
    tool_strict_level: str = "auto"
    tool_parser_plugin: str = ""


@dataclass(frozen=True, slots=True)
class Parsers:
    """The parsers of one engine."""

    kind: Any
    """vLLM's class that parses both; None if there is nothing to parse."""

    tokenizer: Any
    model_config: Any
    auto_tools: bool
    tells_reasoning: bool

    @classmethod
    def from_llm(cls, llm: Any, flags: ParserFlags) -> Self:
        """Return the parsers that the flags name, and the engine's own for reasoning, for a running `AsyncLLM`."""
        from vllm.parser import ParserManager

        config, tokenizer = llm.model_config, llm.renderer.tokenizer
        reasoning = llm.vllm_config.structured_outputs_config
        try:
            _import_plugins(flags.tool_parser_plugin, reasoning.reasoning_parser_plugin)
            kind = parser_class(
                ParserManager,
                tokenizer=tokenizer,
                tool_parser_name=flags.tool_call_parser,
                reasoning_parser_name=reasoning.reasoning_parser,
                enable_auto_tools=flags.enable_auto_tool_choice,
                tool_strict_level=flags.tool_strict_level,
                model_name=config.model,
                is_harmony=config.hf_config.model_type == "gpt_oss",
            )
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(f"--tool-call-parser or --reasoning-parser cannot be used: {error}") from error
        if flags.tool_call_parser is not None:
            count_parsed_calls(config.served_model_name)
        return cls(kind, tokenizer, config, flags.enable_auto_tool_choice, bool(reasoning.reasoning_parser))

    def concerns(self, parsing: AnswerParsing, sampling: Mapping[str, Any]) -> bool:
        """Return whether a chat has anything for vLLM's parsers to read, change or refuse. Most chats have not."""
        return (
            self.kind is not None
            or bool(parsing.tools)
            or parsing.tool_choice != "none"
            or parsing.response_format is not None
            or parsing.reasoning_effort is not None
            or sampling.get("structured_outputs") is not None
        )

    def begin(self, parsing: AnswerParsing, sampling: Mapping[str, Any], prompt_ids: Sequence[int]) -> AnswerReader:
        """Get ready to read the answer to a chat; what vLLM refuses is raised as vLLM raises it."""
        request = _request(parsing, sampling)
        self._check_tools(request.tool_choice)
        template_kwargs = request.build_chat_params(None, "auto").chat_template_kwargs
        parser = self.create(request, template_kwargs)
        if parser is not None and self._may_adjust(request.tool_choice):
            request = self.create(request, template_kwargs).adjust_request(request=request)
        adjusted = {name: value for name in _ADJUSTED if (value := getattr(request, name)) is not None}
        if (structured := request.extract_structured_outputs()) is not None:
            adjusted["structured_outputs"] = structured
        engine: dict[str, Any] = {"reasoning_ended": reasoning_ended(request, parser, list(prompt_ids))}
        if parser is not None and parser.reasoning_parser is not None:
            engine["reasoning_parser_kwargs"] = {"chat_template_kwargs": template_kwargs}
        return AnswerReader(self, request, template_kwargs, {**sampling, **adjusted}, engine, parsing.stream)

    def create(self, request: Any, template_kwargs: Mapping[str, Any]) -> Any:
        """Return a parser for one sequence of an answer; None if there is nothing to parse."""
        if self.kind is None:
            return None
        return self.kind(
            self.tokenizer, request.tools, chat_template_kwargs=template_kwargs, model_config=self.model_config
        )

    def _may_adjust(self, tool_choice: Any) -> bool:
        return always_adjusts(self.kind) or self.kind.reasoning_parser_cls is not None or tool_choice != "none"

    def _check_tools(self, tool_choice: Any) -> None:
        """Refuse to call tools where nothing would notice a call."""
        available = self.kind is not None and self.kind.tool_parser_cls is not None
        if available or tool_choice in (None, "none"):
            return
        named = tool_choice if isinstance(tool_choice, str) else tool_choice.function.name
        raise InvalidRequest(_NOT_AVAILABLE.format(choice=f"tool_choice {named}"))


@dataclass(slots=True)
class _SequenceReader:
    """One sequence of an answer."""

    parser: Any
    """None when it has failed: what follows is sent as it is."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    has_called: bool = False
    knows_prompt: bool = False

    def learn(self, prompt_ids: Sequence[int] | None) -> list[int] | None:
        """Return the prompt as parsers want it, once: the engine tells it with every output, and it may be long."""
        if prompt_ids is None or self.knows_prompt:
            return None
        self.knows_prompt = True
        return list(prompt_ids)


@dataclass(slots=True)
class AnswerReader:
    """One answer while it is read."""

    parsers: Parsers
    request: Any
    template_kwargs: Mapping[str, Any]
    sampling: Mapping[str, Any]
    """The sampling parameters as the parsers want them."""

    engine: Mapping[str, Any]
    """Arguments of `AsyncLLM.add_request` that depend on the chat."""

    stream: bool
    voices: dict[int, _SequenceReader] = field(default_factory=dict)

    def read(self, output: Output, prompt_ids: Sequence[int] | None) -> Output:
        """Return the output with what the parsers make of it; `prompt_ids` are those that the engine tells with it."""
        if self.parsers.kind is None:
            return output
        if (voice := self.voices.get(output.index)) is None:
            parser = self.parsers.create(self.request, self.template_kwargs)
            self.voices[output.index] = voice = _SequenceReader(parser)
        voice.token_ids += output.token_ids
        read = self._piece(voice, output, prompt_ids) if self.stream else self._whole(voice, output, prompt_ids)
        if not self.parsers.tells_reasoning:
            return read
        # Counted once, at the end: the parsers count from the start each time.
        return replace(read, reasoning_tokens=0 if output.finish_reason is None else self._count_reasoning(voice))

    def _piece(self, voice: _SequenceReader, output: Output, prompt_ids: Sequence[int] | None) -> Output:
        finished = output.finish_reason is not None
        if not (output.text or voice.token_ids or finished):
            return replace(output, message={})  # the prompt is still being computed
        if voice.parser is None:
            return replace(output, message=self._unread(output.text))
        try:
            delta = voice.parser.parse_delta(
                delta_text=output.text,
                delta_token_ids=list(output.token_ids),
                request=self.request,
                prompt_token_ids=voice.learn(prompt_ids),
                finished=finished,
            )
        except Exception:  # foreign code, over what a model said: any error
            logger.exception("a parser failed; the rest of the answer is sent as it is")
            voice.parser = None
            return replace(output, message=self._unread(output.text))
        message = {} if delta is None else delta.model_dump(exclude_unset=True)
        voice.has_called |= bool(message.get("tool_calls"))
        reason = output.finish_reason
        if voice.has_called and reason == "stop" and isinstance(self.request.tool_choice, str | None):
            reason = "tool_calls"
        return replace(output, message=self._limited(message, by_index=True), finish_reason=reason)

    def _whole(self, voice: _SequenceReader, output: Output, prompt_ids: Sequence[int] | None) -> Output:
        voice.text.append(output.text)
        if (learned := voice.learn(prompt_ids)) is not None:
            tell_prompt(voice.parser, learned)
        if output.finish_reason is None:
            return output
        text = "".join(voice.text)
        try:
            reasoning, content, calls = voice.parser.parse(
                text,
                self.request,
                enable_auto_tools=self.parsers.auto_tools,
                model_output_token_ids=voice.token_ids,
            )
        except Exception:  # foreign code, over what a model said: any error
            logger.exception("a parser failed; the answer is sent as it is")
            return replace(output, message=self._unread(text))
        message = self._message(reasoning if self.request.include_reasoning else None, content, calls or [])
        return replace(output, message=message, finish_reason=self._reason(output.finish_reason, message))

    def _unread(self, text: str) -> dict[str, Any]:
        """Return the text that no parser has read; nothing where it may contain reasoning that must not be shown."""
        return {"content": text} if self.request.include_reasoning or not self.parsers.tells_reasoning else {}

    def _message(self, reasoning: str | None, content: str | None, calls: Sequence[Any]) -> dict[str, Any]:
        choice = self.request.tool_choice
        if choice in (None, "none") or (choice == "auto" and self.parsers.kind.tool_parser_cls is None):
            return {"reasoning": reasoning, "content": content}
        shaped = [
            {
                "id": call.id or make_tool_call_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
        if choice != "auto":
            content = content or ""  # as vLLM: a forced call has no content, but not none either
        return self._limited({"reasoning": reasoning, "content": content, "tool_calls": shaped}, by_index=False)

    def _reason(self, reason: str, message: Mapping[str, Any]) -> str:
        """OpenAI's: `tool_calls` if the model chose to call, `stop` if the request names the function to call."""
        choice = self.request.tool_choice
        called = choice == "auto" and message.get("tool_calls")
        return "tool_calls" if called or (choice == "required" and reason == "stop") else reason

    def _limited(self, message: dict[str, Any], *, by_index: bool) -> dict[str, Any]:
        """Return the message with the first call alone, if the client wants no more."""
        calls = message.get("tool_calls")
        if calls and self.request.parallel_tool_calls is False:
            message["tool_calls"] = [call for call in calls if call["index"] == 0] if by_index else calls[:1]
        return message

    def _count_reasoning(self, voice: _SequenceReader) -> int:
        parser = voice.parser or self.parsers.create(self.request, self.template_kwargs)
        return int(parser.count_reasoning_tokens(tuple(voice.token_ids)))


def _import_plugins(tools: str, reasoning: str | None) -> None:
    """Load the operator's own parsers, which register themselves."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    if tools:
        ToolParserManager.import_tool_parser(tools)
    if reasoning:
        ReasoningParserManager.import_reasoning_parser(reasoning)


def _request(parsing: AnswerParsing, sampling: Mapping[str, Any]) -> Any:
    """vLLM's request, with what its parsers look at."""
    from pydantic import ValidationError
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    past = [{"type": "function", "id": "", "function": {"name": "", "arguments": ""}}] * parsing.past_tool_calls
    fields: dict[str, Any] = {
        "messages": [{"role": "assistant", "tool_calls": past}] if past else [{"role": "user", "content": ""}],
        "tools": parsing.tools,
        "tool_choice": parsing.tool_choice,
        "parallel_tool_calls": parsing.parallel_tool_calls,
        "response_format": parsing.response_format,
        "structured_outputs": sampling.get("structured_outputs"),
        "include_reasoning": parsing.include_reasoning,
        "reasoning_effort": parsing.reasoning_effort,
        "chat_template_kwargs": dict(parsing.template_kwargs),
        "stream": parsing.stream,
        **{name: sampling[name] for name in _ADJUSTED if name in sampling},
    }
    try:
        return ChatCompletionRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the request"
        raise InvalidRequest(f"{where}: {first['msg']}") from None
