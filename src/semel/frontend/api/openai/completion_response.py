"""Text completion responses in OpenAI's shape, with the same fields as vLLM's server. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from semel.core import Output, Prompt
from semel.frontend.api.openai.chat_response import Head
from semel.frontend.api.shared.logprobs import (
    Decode,
    PromptLogprob,
    PromptPositions,
    Step,
    TextLogprobs,
    append_steps,
    extend_logprobs,
    no_logprobs,
    prompt_logprobs,
    prompt_steps,
    steps_of,
)
from semel.frontend.api.shared.response_options import ResponseOptions
from semel.frontend.api.shared.usage import StreamedUsage, Usage, UsageCounter

__all__ = ["CompletionResponse", "Echo", "TextChoice", "TextChunkChoice", "TextCompletion", "TextCompletionChunk"]


class TextChoice(TypedDict):
    """One of the `n` answers to a prompt."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: Sequence[int] | None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None
    prompt_token_ids: Sequence[int] | None
    routed_experts: None


class TextCompletion(TypedDict):
    """How prompts go on."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    service_tier: None
    system_fingerprint: str
    usage: Usage
    kv_transfer_params: None
    ec_transfer_params: None
    metrics: None


class TextChunkChoice(TypedDict):
    """More of one of the `n` answers to a prompt."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_token_ids: Sequence[int] | None
    token_ids: Sequence[int] | None


class TextCompletionChunk(TypedDict):
    """More of how prompts go on."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChunkChoice]
    system_fingerprint: NotRequired[str]
    usage: NotRequired[StreamedUsage]


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompts that the choices begin with."""

    texts: Sequence[str]
    alone: bool
    """True if the response has the prompt only, without the one token that was generated."""


@dataclass(slots=True)
class _Choice:
    """The output of one sequence so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: TextLogprobs = field(default_factory=no_logprobs)
    offset: int = 0
    """The offset of the next token's text."""

    begun: bool = False
    completion_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class CompletionResponse:
    """Builds one text completion response: chunk by chunk for a stream, or complete at the end.

    Each prompt has `count` choices. They are ordered by prompt.
    """

    def __init__(
        self,
        head: Head,
        prompts: Sequence[Prompt],
        decode: Decode,
        *,
        count: int,
        options: ResponseOptions,
        echo: Echo | None = None,
    ) -> None:
        self._head = head
        self._prompts = [prompt.token_ids for prompt in prompts]
        self._decode = decode
        self._count = count
        self._options = options
        self._echo = echo
        self._usage = UsageCounter(sum(map(len, self._prompts)))
        self._choices = [_Choice() for _ in range(len(prompts) * count)]
        self._prompt_logprobs: dict[int, PromptPositions] = {}

    def add(self, prompt: int, output: Output) -> None:
        """Collect an output of the prompt with this index for the complete response."""
        choice, text, logprobs = self._take(prompt, output)
        choice.text.append(text)
        choice.token_ids += output.token_ids
        if logprobs is not None:
            extend_logprobs(choice.logprobs, logprobs)
        if output.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_reason

    def whole(self) -> TextCompletion:
        """The complete response."""
        return {
            "id": self._head.answer_id,
            "object": "text_completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": [self._whole_choice(index, choice) for index, choice in enumerate(self._choices)],
            "service_tier": None,
            "system_fingerprint": self._head.fingerprint,
            "usage": self._usage.whole(),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def chunks(self, prompt: int, output: Output) -> Iterator[TextCompletionChunk]:
        """The chunks for one output of the prompt with this index."""
        index = prompt * self._count + output.index
        is_first = not self._choices[index].begun
        choice, text, logprobs = self._take(prompt, output)
        if not (text or output.token_ids or choice.completion_tokens):
            return  # the engine is still computing the prompt
        shaped: TextChunkChoice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "prompt_token_ids": self._prompts[prompt] if is_first and self._tells_prompt else None,
            "token_ids": output.token_ids if self._options.token_ids else None,
        }
        chunk = self._chunk([shaped])
        if output.finish_reason is not None and not self._options.usage:
            chunk["system_fingerprint"] = self._head.fingerprint
        if self._options.running_usage:
            chunk["usage"] = UsageCounter(len(self._prompts[prompt])).running(choice.completion_tokens)
        yield chunk

    def closing(self) -> Iterator[TextCompletionChunk]:
        """The last chunk of a stream, with its usage, if the client requested it."""
        if self._options.usage:
            chunk = self._chunk([])
            chunk["usage"] = self._usage.known()
            chunk["system_fingerprint"] = self._head.fingerprint
            yield chunk

    def _chunk(self, choices: list[TextChunkChoice]) -> TextCompletionChunk:
        return {
            "id": self._head.answer_id,
            "object": "text_completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": choices,
        }

    @property
    def _tells_prompt(self) -> bool:
        return self._options.token_ids or self._echo is not None

    def _take(self, prompt: int, output: Output) -> tuple[_Choice, str, TextLogprobs | None]:
        """Count an output. Returns its choice, text and log probabilities, with the echoed prompt before them."""
        self._usage.add(output)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[prompt] = output.prompt_logprobs
        choice = self._choices[prompt * self._count + output.index]
        choice.completion_tokens += len(output.token_ids)
        text, steps = output.text, steps_of(output) if self._options.logprobs else []
        if self._echo is not None:
            text, steps = self._echoed(self._echo, prompt, text, steps, is_first=not choice.begun)
        choice.begun = True
        if not self._options.logprobs:
            return choice, text, None
        logprobs = no_logprobs()
        choice.offset = append_steps(logprobs, steps, self._options, self._decode, offset=choice.offset)
        return choice, text, logprobs

    def _echoed(
        self, echo: Echo, prompt: int, text: str, steps: list[Step], *, is_first: bool
    ) -> tuple[str, list[Step]]:
        if echo.alone:
            text, steps = "", []
        if not is_first:
            return text, steps
        echoed = "" if self._options.token_ids else echo.texts[prompt]  # as vLLM: its token ids are in the response
        logprobs = self._prompt_logprobs.get(prompt, ()) if self._options.logprobs else ()
        return echoed + text, [*prompt_steps(self._prompts[prompt], logprobs), *steps]

    def _whole_choice(self, index: int, choice: _Choice) -> TextChoice:
        prompt = index // self._count
        return {
            "index": index,
            "text": "".join(choice.text),
            "logprobs": choice.logprobs if self._options.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if self._options.token_ids else None,
            "prompt_logprobs": prompt_logprobs(self._prompt_logprobs.get(prompt)),
            "prompt_token_ids": self._prompts[prompt] if self._options.token_ids else None,
            "routed_experts": None,
        }
