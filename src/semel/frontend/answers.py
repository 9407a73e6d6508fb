"""Answers in OpenAI's shape: pure functions from an engine's outputs to JSON values."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from semel.engine import Output

__all__ = ["Answer", "error_body", "model_list"]

Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True)
class _Choice:
    """What has been generated of one sequence."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None


class Answer:
    """One answer, shaped piece by piece as a stream or at the end as a whole."""

    def __init__(self, request_id: str, model: str, prompt_ids: Sequence[int], decode: Decode, *, count: int) -> None:
        self._head = {"id": f"chatcmpl-{request_id}", "created": int(time.time()), "model": model}
        self._prompt_ids = prompt_ids
        self._decode = decode
        self._choices = [_Choice() for _ in range(count)]

    def begin(self) -> list[Mapping[str, Any]]:
        """The chunks that open a stream: who speaks, for every choice."""
        opening = {"role": "assistant", "content": ""}
        return [self._chunk(index, opening, None) for index in range(len(self._choices))]

    def add(self, output: Output) -> None:
        """Keep an output for the whole answer."""
        choice = self._choices[output.index]
        choice.text.append(output.text)
        choice.token_ids += output.token_ids
        choice.logprobs += self._logprobs(output)
        choice.finish_reason = output.finish_reason or choice.finish_reason

    def chunk(self, output: Output, *, logprobs: bool, token_ids: bool) -> Mapping[str, Any]:
        """An output as a chunk of a stream."""
        self._choices[output.index].token_ids += output.token_ids
        chunk = self._chunk(output.index, {"content": output.text}, output.finish_reason)
        if logprobs:
            chunk["choices"][0]["logprobs"] = {"content": self._logprobs(output)}
        if token_ids:
            chunk["choices"][0]["token_ids"] = list(output.token_ids)
        return chunk

    def usage_chunk(self) -> Mapping[str, Any]:
        """The chunk that closes a stream with what it cost."""
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": self._usage()}

    def whole(self, *, logprobs: bool, token_ids: bool) -> Mapping[str, Any]:
        """The answer in one piece."""
        choices: list[dict[str, Any]] = []
        for index, choice in enumerate(self._choices):
            shaped: dict[str, Any] = {
                "index": index,
                "message": {"role": "assistant", "content": "".join(choice.text)},
                "logprobs": {"content": choice.logprobs} if logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            if token_ids:
                shaped["token_ids"] = choice.token_ids
            choices.append(shaped)
        body = {**self._head, "object": "chat.completion", "choices": choices, "usage": self._usage()}
        return {**body, "prompt_token_ids": list(self._prompt_ids)} if token_ids else body

    def _chunk(self, index: int, delta: Mapping[str, Any], finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _usage(self) -> Mapping[str, int]:
        prompt, generated = len(self._prompt_ids), sum(len(choice.token_ids) for choice in self._choices)
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}

    def _logprobs(self, output: Output) -> list[dict[str, Any]]:
        steps = zip(output.token_ids, output.logprobs or (), strict=False)
        return [{**self._entry(token, step[token]), "top_logprobs": self._top(step)} for token, step in steps]

    def _top(self, step: Mapping[int, float]) -> list[dict[str, Any]]:
        ranked = sorted(step.items(), key=lambda entry: -entry[1])
        return [self._entry(token, logprob) for token, logprob in ranked]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._decode([token])
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}


def error_body(message: str, *, code: str, status: int) -> Mapping[str, Any]:
    """An error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def model_list(name: str, max_tokens: int, created: int) -> Mapping[str, Any]:
    """What `/v1/models` answers."""
    model = {"id": name, "object": "model", "created": created, "owned_by": "semel", "max_model_len": max_tokens}
    return {"object": "list", "data": [model]}
