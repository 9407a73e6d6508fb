"""Answers to chats in OpenAI's shape, field for field as vLLM's own server: pure functions from outputs to JSON values.

What an answer says is the engine's: the text, or where parsers read it, the message that they made of it. Fields that
vLLM has and semel never fills are there, and null.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from semel.core import Output, Prompt, PromptLogprob
from semel.frontend.api.logprobs import Decode, chat_logprobs, prompt_logprobs
from semel.frontend.api.response_options import ResponseOptions
from semel.frontend.api.server import Model, ModelList
from semel.frontend.api.usage import Usage

__all__ = ["ChatResponse", "Head", "model_list"]

_NOT_SENT: Final = dict.fromkeys(("refusal", "annotations", "audio", "function_call"))
"""Of a message."""

_NOT_REPORTED: Final = dict.fromkeys(("prompt_text", "kv_transfer_params", "ec_transfer_params", "metrics"))
"""Of an answer."""


@dataclass(frozen=True, slots=True)
class Head:
    """What every piece of an answer begins with."""

    answer_id: str
    model: str
    fingerprint: str
    """Changes with what the model is given."""

    created: int = field(default_factory=lambda: int(time.time()))

    def of(self, kind: str) -> dict[str, Any]:
        """The beginning of an object of this kind."""
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}


@dataclass(slots=True)
class _Choice:
    """What has been generated of one sequence."""

    text: list[str] = field(default_factory=list)
    message: Mapping[str, Any] | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    completion_tokens: int = 0


class ChatResponse:
    """One answer, shaped piece by piece as a stream or at the end as a whole."""

    def __init__(
        self,
        head: Head,
        prompt: Prompt,
        decode: Decode,
        *,
        count: int,
        showing: ResponseOptions,
        role: str = "assistant",
    ) -> None:
        self._head = head
        self._prompt_ids = prompt.token_ids
        self._usage = Usage.of(prompt)
        self._decode = decode
        self._showing = showing
        self._role = role
        self._choices = [_Choice() for _ in range(count)]
        self._prompt_logprobs: Sequence[Mapping[int, PromptLogprob] | None] | None = None
        self._begun = False

    def add(self, output: Output) -> None:
        """Keep an output for the whole answer."""
        self._usage.add(output)
        self._prompt_logprobs = output.prompt_logprobs or self._prompt_logprobs
        choice = self._choices[output.index]
        choice.text.append(output.text)
        choice.message = choice.message if output.message is None else output.message
        if self._showing.token_ids:
            choice.token_ids += output.token_ids
        if self._showing.logprobs:
            choice.logprobs += chat_logprobs(output, self._showing, self._decode)
        if output.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_reason

    def whole(self) -> Mapping[str, Any]:
        """The answer in one piece."""
        return {
            **self._head.of("chat.completion"),
            "choices": [self._whole_choice(index, choice) for index, choice in enumerate(self._choices)],
            "service_tier": None,
            "system_fingerprint": self._head.fingerprint,
            "usage": self._usage.whole(),
            "prompt_logprobs": prompt_logprobs(self._prompt_logprobs),
            "prompt_token_ids": self._prompt_ids if self._showing.token_ids else None,
            **_NOT_REPORTED,
        }

    def chunks(self, output: Output) -> Iterator[Mapping[str, Any]]:
        """The chunks of a stream that an output becomes: before the first, who speaks, for every choice."""
        self._usage.add(output)
        if not self._begun:
            self._begun = True
            yield from self._beginning()
        choice = self._choices[output.index]
        choice.completion_tokens += len(output.token_ids)
        if (shaped := self._piece(output)) is None:
            return
        chunk = {**self._head.of("chat.completion.chunk"), "choices": [shaped]}
        if output.finish_reason is not None:
            shaped["stop_reason"] = output.stop_reason
            if not self._showing.usage:
                chunk["system_fingerprint"] = self._head.fingerprint
        if self._showing.running_usage:
            chunk["usage"] = self._running_usage(choice.completion_tokens)
        yield chunk

    def closing(self) -> Iterator[Mapping[str, Any]]:
        """The chunk that closes a stream with what it cost, if that was asked for."""
        if self._showing.usage:
            chunk = {**self._head.of("chat.completion.chunk"), "choices": [], "usage": self._usage.known()}
            yield {**chunk, "system_fingerprint": self._head.fingerprint}

    def _whole_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        hidden = self._is_hidden(choice.message)
        return {
            "index": index,
            "message": self._message(choice),
            "logprobs": {"content": choice.logprobs} if self._showing.logprobs and not hidden else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if self._showing.token_ids and not hidden else None,
            "routed_experts": None,
        }

    def _message(self, choice: _Choice) -> dict[str, Any]:
        read = {"content": "".join(choice.text)} if choice.message is None else choice.message
        said = {"role": self._role, "content": read.get("content"), **_NOT_SENT, "reasoning": read.get("reasoning")}
        return {**said, "tool_calls": read["tool_calls"]} if read.get("tool_calls") else said

    def _beginning(self) -> Iterator[Mapping[str, Any]]:
        for index in range(len(self._choices)):
            delta = {"role": self._role, "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            prompt = {"prompt_token_ids": self._prompt_ids if self._showing.token_ids else None, "prompt_text": None}
            chunk = {**self._head.of("chat.completion.chunk"), "choices": [choice], **prompt}
            yield {**chunk, "usage": self._running_usage(0)} if self._showing.running_usage else chunk

    def _piece(self, output: Output) -> dict[str, Any] | None:
        """The choice in a chunk; None if it would say nothing."""
        hidden = self._is_hidden(output.message)
        logprobs = token_ids = None
        if self._showing.logprobs and not hidden:
            logprobs = {"content": chat_logprobs(output, self._showing, self._decode)}
        if self._showing.token_ids and not hidden:
            token_ids = output.token_ids
        said = {"content": output.text} if output.message is None else output.message
        if not said and output.finish_reason is None and logprobs is None and token_ids is None:
            return None
        return {
            "index": output.index,
            "delta": said,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "token_ids": token_ids,
        }

    def _is_hidden(self, message: Mapping[str, Any] | None) -> bool:
        """Whether tokens must not be shown because reasoning must not, and there may be some."""
        return message is not None and not self._showing.reasoning

    def _running_usage(self, completion_tokens: int) -> dict[str, Any]:
        """That of one choice; its reasoning is counted at its end."""
        reasoning = self._usage.reasoning_tokens
        return {
            "prompt_tokens": self._usage.prompt_tokens,
            "total_tokens": self._usage.prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
            "completion_tokens_details": None if reasoning is None else {"reasoning_tokens": reasoning},
        }


def model_list(name: str, max_tokens: int, created: int) -> ModelList:
    """What `/v1/models` answers."""
    model: Model = {"id": name, "object": "model", "created": created, "owned_by": "semel", "max_model_len": max_tokens}
    return {"object": "list", "data": [model]}
