"""Requests: OpenAI's fields and vLLM's extensions, under their names.

A field that is not listed is refused by name: an answer that silently ignores part of its request is worse than an
error. Numbers that cost memory or time are bounded here (threats S15).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Discriminator, Field, Tag, WithJsonSchema, model_validator

from semel.core import MEDIA_IO, AnswerParsing
from semel.core.token_limits import check_tokens_left
from semel.errors import InvalidRequest
from semel.frontend.api.openai.structured_outputs import (
    ResponseFormat,
    StructuredOutputs,
    check_json,
    constrained_field,
    constraint,
)
from semel.frontend.api.openai.tools import Tool, ToolChoice, chosen
from semel.frontend.api.shared.faults import FORMS
from semel.frontend.api.shared.fields import Ignored
from semel.frontend.api.shared.media_options import MediaIo
from semel.frontend.api.shared.request_base import (
    Biases,
    Count,
    Effort,
    Int64,
    OwnedRequest,
    RequestBody,
    RequestName,
    StrictModel,
    Token,
    Tokens,
    Top,
    Words,
)
from semel.frontend.api.shared.response_options import ResponseOptions
from semel.render import MESSAGE, ChatRequest

__all__ = [
    "ChatCompletionRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "InvocationRequest",
    "RepetitionDetection",
    "StreamOptions",
    "TokenizeChatRequest",
    "TokenizeRequest",
    "TokenizeTextRequest",
    "check_processor_options",
]

_SAMPLING: Final = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "logprob_token_ids",
        "min_p",
        "min_tokens",
        "n",
        "presence_penalty",
        "prompt_logprobs",
        "repetition_detection",
        "repetition_penalty",
        "seed",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "stream_interval",
        "temperature",
        "thinking_token_budget",
        "top_k",
        "top_p",
    }
)
"""Fields that the engine has as sampling parameters under the same name."""


_TokenPrompt = Annotated[
    list[Token], Field(fail_fast=True, min_length=1)
]  # one error is enough: a million take seconds
_Prompts = 256
"""Maximum number of prompts of one request."""

_MAX_TEMPLATE_CHARS: Final = 1_048_576
"""Maximum characters of the JSON of tools and chat template arguments together."""

_MAX_CHOSEN_LOGPROBS: Final = 4_096
"""Maximum of `n` times `logprob_token_ids`: the log probabilities of one step, which arrive together."""

_MAX_SEQUENCES: Final = 256
"""Maximum of prompts times `n` in one request: each is a sequence in the engine (threats S21)."""

_NOT_OF_PROCESSORS: Final = {
    MEDIA_IO: "is a field of its own",
    "use_audio_in_video": "is not supported: it puts a clip and a video into the same positions of a prompt, which "
    "share no embeddings there; send the sound as an item of its own",
}

_Pattern = Annotated[int, Field(ge=0, le=256)]
_Repeats = Annotated[int, Field(ge=0, le=1_024)]

_Message = Annotated[dict[str, Any], WithJsonSchema(dict(MESSAGE))]


class StreamOptions(StrictModel):
    """What a stream carries besides text."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = None
    """OpenAI's padding that hides the size of tokens from a network observer. semel does not pad."""


class RepetitionDetection(StrictModel):
    """When to end an answer that repeats itself."""

    max_pattern_size: _Pattern = 0
    min_pattern_size: _Pattern = 0
    min_count: _Repeats = 0


class _Chat(OwnedRequest):
    """The fields that decide the prompt of a chat."""

    messages: Annotated[list[_Message], Field(fail_fast=True, min_length=1)]
    tools: Annotated[list[Tool], Field(max_length=1_024)] | None = None
    documents: Annotated[list[dict[str, str]], Field(max_length=1_024)] | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] = Field(default_factory=dict)
    media_io_kwargs: MediaIo | None = None

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.mm_processor_kwargs:
            check_processor_options(self.mm_processor_kwargs)
        if self.tools or self.chat_template_kwargs:
            both = [[tool.for_template() for tool in self.tools or ()], self.chat_template_kwargs]
            check_json(both, "tools", "chat_template_kwargs", max_chars=_MAX_TEMPLATE_CHARS)
        return self

    def _chat_request(self, *, return_media_ids: bool = False) -> ChatRequest:
        """Return the parts of the request that determine the prompt."""
        return ChatRequest(
            messages=self.messages,
            tools=None if self.tools is None else [tool.for_template() for tool in self.tools],
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.template_kwargs(),
            mm_processor_kwargs=self.mm_processor_kwargs,
            media_io_kwargs=None if self.media_io_kwargs is None else self.media_io_kwargs.options(),
            return_media_ids=return_media_ids,
        )

    def template_kwargs(self) -> dict[str, Any]:
        """The arguments of the chat template. Some models' templates switch reasoning on and off with one."""
        kwargs = dict(self.chat_template_kwargs)
        if self.documents is not None:
            kwargs["documents"] = self.documents
        if self.reasoning_effort is not None:
            kwargs.setdefault("enable_thinking", self.reasoning_effort != "none")
            kwargs["reasoning_effort"] = self.reasoning_effort
        return kwargs


class _Sampled(OwnedRequest, Ignored):
    """The fields that decide the answer, whatever the prompt."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    request_id: RequestName | None = None
    """The end of the id of the answer; inside, requests have ids of our own."""

    priority: Int64 = 0

    n: Annotated[int, Field(ge=1, le=128)] = 1
    stop: Words | Annotated[list[Words], Field(max_length=16)] | None = None
    seed: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases | None = None
    response_format: ResponseFormat | None = None

    top_k: Int64 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Int64], Field(max_length=128)] | None = None
    allowed_token_ids: Annotated[list[Token], Field(min_length=1, max_length=1_048_576)] | None = None
    bad_words: Annotated[list[Words], Field(max_length=1_024)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: Top | None = None
    logprob_token_ids: Annotated[list[Token], Field(max_length=128)] | None = None
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    repetition_detection: RepetitionDetection | None = None
    stream_interval: Annotated[int, Field(ge=1, le=64)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest.of("stream_options", "only with stream; leave it out, or set stream to true")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest.of("prompt_logprobs", "not in a stream; leave one of the two out")
        if (sampling := self.n * len(self.logprob_token_ids or ())) > _MAX_CHOSEN_LOGPROBS:
            raise InvalidRequest.of(
                "logprob_token_ids",
                f"{sampling:,} for the {self.n} answers; the limit is {_MAX_CHOSEN_LOGPROBS:,}: name fewer, or lower n",
            )
        form, outputs = self.response_format, self.structured_outputs
        if (form or outputs) and (name := constrained_field(form, outputs)) is not None:
            check_tokens_left(self.__dict__, name)
        return self

    def _sampling(self) -> dict[str, object]:
        """Return the engine's sampling parameters, without those that the client left out."""
        sampling = {name: value for name in _SAMPLING if (value := self.__dict__[name]) is not None}
        if self.repetition_detection is not None:
            sampling["repetition_detection"] = self.repetition_detection.model_dump()
        return sampling

    def _response_options(self, top_logprobs: int | None, *, logprobs: bool, reasoning: bool = True) -> ResponseOptions:
        """Return the optional parts of the response; `top_logprobs` of each token, None for the chosen ones."""
        options = self.stream_options
        usage = options is not None and bool(options.include_usage)
        return ResponseOptions(
            logprobs,
            None if self.logprob_token_ids else top_logprobs,
            self.return_tokens_as_token_ids,
            self.return_token_ids,
            reasoning,
            usage,
            running_usage=usage and options is not None and bool(options.continuous_usage_stats),
        )


def check_processor_options(options: Mapping[str, object]) -> None:
    """Refuse by name what is no option here of any processor."""
    for name, reason in _NOT_OF_PROCESSORS.items():
        if options.get(name):
            raise InvalidRequest.of(f"mm_processor_kwargs.{name}", reason)


class ChatCompletionRequest(_Chat, _Sampled):
    """A chat, and how to answer it."""

    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    logprobs: bool = False
    top_logprobs: Top = 0
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    return_media_ids: bool = False

    def chat(self) -> ChatRequest:
        """Return the parts of the request that determine the prompt."""
        return self._chat_request(return_media_ids=self.return_media_ids)

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.tools is not None or self.tool_choice is not None:
            chosen(self.tool_choice, self.tools)
        for name in ("top_logprobs", "logprob_token_ids"):
            if getattr(self, name) and not self.logprobs:
                raise InvalidRequest.of(name, "only with logprobs; leave it out, or set logprobs to true")
        return self

    @property
    def role(self) -> str:
        """The role of the answer."""
        role = "assistant" if self.add_generation_prompt else self.messages[-1].get("role")
        return role if isinstance(role, str) else "assistant"

    def sampling(self) -> Mapping[str, object]:
        """The engine's sampling parameters. The engine decides those that the client left out."""
        sampling = self._sampling()
        if (longest := self.max_completion_tokens or self.max_tokens) is not None:
            sampling["max_tokens"] = longest
        if self.logprobs and not self.logprob_token_ids:
            sampling["logprobs"] = self.top_logprobs
        if self.structured_outputs and (outputs := constraint(None, self.structured_outputs)) is not None:
            sampling["structured_outputs"] = outputs
        return sampling

    def parsing(self) -> AnswerParsing:
        """Return how the engine parses the answer."""
        form = self.response_format
        return AnswerParsing(
            tools=None if self.tools is None else [tool.for_template() for tool in self.tools],
            tool_choice=chosen(self.tool_choice, self.tools) if self.tools else "none",
            parallel_tool_calls=self.parallel_tool_calls,
            past_tool_calls=_count_calls(self.messages),
            response_format=None if form is None else form.model_dump(by_alias=True, exclude_none=True),
            include_reasoning=self.include_reasoning,
            reasoning_effort=self.reasoning_effort,
            template_kwargs=self.chat_template_kwargs,
            stream=self.stream,
        )

    def response_options(self) -> ResponseOptions:
        """The optional parts of the response."""
        return self._response_options(self.top_logprobs, logprobs=self.logprobs, reasoning=self.include_reasoning)


class CompletionRequest(_Sampled):
    """One prompt or several, of text or of tokens, and how to go on with each."""

    prompt: (
        str
        | Annotated[list[Token], Field(fail_fast=True, min_length=1)]
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=_Prompts)]
        | Annotated[list[_TokenPrompt], Field(fail_fast=True, min_length=1, max_length=_Prompts)]
    )
    add_special_tokens: bool = True
    max_tokens: Count = 16
    logprobs: Top | None = None
    echo: bool = False

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if not self.max_tokens and not self.echo:
            raise InvalidRequest.of("max_tokens", "0 only with echo; ask for 1 or more")
        if self.logprob_token_ids and self.logprobs is None:
            raise InvalidRequest.of("logprob_token_ids", "only with logprobs; leave it out, or set logprobs")
        if (sequences := len(self.prompts()) * self.n) > _MAX_SEQUENCES:
            raise InvalidRequest.of(
                "n",
                f"{len(self.prompts()):,} prompts with {self.n} answers each are {sequences:,} sequences; the limit is "
                f"{_MAX_SEQUENCES}: send fewer prompts, or lower n",
            )
        return self

    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens = [token for token in self.prompt if isinstance(token, int)]
        return [tokens] if tokens else [prompt for prompt in self.prompt if not isinstance(prompt, int)]

    def sampling(self) -> Mapping[str, object]:
        """The engine's sampling parameters. The engine decides those that the client left out."""
        sampling = self._sampling()
        sampling["max_tokens"] = self.max_tokens or 1  # an echo alone still generates one token
        if self.logprobs is not None:
            if not self.logprob_token_ids:
                sampling["logprobs"] = self.logprobs
            if self.echo:
                sampling.setdefault("prompt_logprobs", self.logprobs)
        if (outputs := constraint(self.response_format, self.structured_outputs)) is not None:
            sampling["structured_outputs"] = outputs
        return sampling

    def response_options(self) -> ResponseOptions:
        """The optional parts of the response."""
        return self._response_options(self.logprobs or 0, logprobs=self.logprobs is not None)


class TokenizeTextRequest(RequestBody):
    """A text to be shown as tokens."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(_Chat):
    """A chat to be shown as tokens."""

    add_special_tokens: Literal[False] = False
    return_token_strs: bool = False

    def chat(self) -> ChatRequest:
        """Return the parts of the request that determine the prompt."""
        return self._chat_request()


def _form(value: Any) -> str:
    return FORMS[isinstance(value, dict) and "messages" in value]


InvocationRequest = Annotated[
    Annotated[CompletionRequest, Tag(FORMS[0])] | Annotated[ChatCompletionRequest, Tag(FORMS[1])], Discriminator(_form)
]
"""The body of a request decides what it is, as in vLLM."""

TokenizeRequest = Annotated[
    Annotated[TokenizeTextRequest, Tag(FORMS[0])] | Annotated[TokenizeChatRequest, Tag(FORMS[1])], Discriminator(_form)
]


class DetokenizeRequest(RequestBody):
    """Tokens to be shown as text."""

    tokens: Annotated[list[Token], Field(fail_fast=True)]


def _count_calls(messages: Sequence[Mapping[str, Any]]) -> int:
    """The number of tool calls in a chat so far."""
    count = 0
    for message in messages:
        if message.get("role") == "assistant" and isinstance(calls := message.get("tool_calls"), list):
            count += len(calls)
    return count
