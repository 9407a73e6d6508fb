"""Answers to text completions in OpenAI's shape: pure functions from an engine's outputs to JSON values."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from semel.engine import Output

__all__ = ["Continuation"]


@dataclass(slots=True)
class _Logprobs:
    """OpenAI's four parallel lists."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[str, float]] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def extend(self, other: _Logprobs) -> None:
        self.tokens += other.tokens
        self.token_logprobs += other.token_logprobs
        self.top_logprobs += other.top_logprobs
        self.text_offset += other.text_offset


@dataclass(slots=True)
class _Choice:
    """What has been generated of one sequence."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: _Logprobs = field(default_factory=_Logprobs)
    offset: int = 0
    """Where the text of the next token begins."""

    finish_reason: str | None = None


class Continuation:
    """How prompts go on, shaped piece by piece as a stream or at the end as a whole.

    Each prompt has `count` choices; those of the first prompt come first.
    """

    def __init__(
        self,
        request_id: str,
        model: str,
        prompts: Sequence[Sequence[int]],
        decode: Callable[[Sequence[int]], str],
        *,
        count: int,
    ) -> None:
        self._head = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._prompts = prompts
        self._decode = decode
        self._count = count
        self._choices = [_Choice() for _ in range(len(prompts) * count)]

    def add(self, prompt: int, output: Output) -> None:
        """Keep an output of the prompt of this number for the whole answer."""
        choice = self._choices[prompt * self._count + output.index]
        choice.text.append(output.text)
        choice.token_ids += output.token_ids
        choice.logprobs.extend(self._logprobs(choice, output))
        choice.finish_reason = output.finish_reason or choice.finish_reason

    def chunk(self, prompt: int, output: Output, *, logprobs: bool, token_ids: bool) -> Mapping[str, Any]:
        """An output as a chunk of a stream."""
        index = prompt * self._count + output.index
        choice = self._choices[index]
        choice.token_ids += output.token_ids
        told = self._logprobs(choice, output) if logprobs else None
        shaped = _shaped(index, output.text, told, output.finish_reason)
        if token_ids:
            shaped["token_ids"] = list(output.token_ids)
        return {**self._head, "choices": [shaped]}

    def usage_chunk(self) -> Mapping[str, Any]:
        """The chunk that closes a stream with what it cost."""
        return {**self._head, "choices": [], "usage": self._usage()}

    def whole(self, *, logprobs: bool, token_ids: bool) -> Mapping[str, Any]:
        """The answer in one piece."""
        choices: list[dict[str, Any]] = []
        for index, choice in enumerate(self._choices):
            told = choice.logprobs if logprobs else None
            shaped = _shaped(index, "".join(choice.text), told, choice.finish_reason)
            if token_ids:
                shaped["token_ids"] = choice.token_ids
                shaped["prompt_token_ids"] = list(self._prompts[index // self._count])
            choices.append(shaped)
        return {**self._head, "choices": choices, "usage": self._usage()}

    def _logprobs(self, choice: _Choice, output: Output) -> _Logprobs:
        told = _Logprobs()
        for token, step in zip(output.token_ids, output.logprobs or (), strict=False):
            text = self._decode([token])
            told.tokens.append(text)
            told.token_logprobs.append(_finite(step[token]))
            told.top_logprobs.append({self._decode([one]): _finite(logprob) for one, logprob in step.items()})
            told.text_offset.append(choice.offset)
            choice.offset += len(text)
        return told

    def _usage(self) -> Mapping[str, int]:
        prompts = sum(map(len, self._prompts))
        generated = sum(len(choice.token_ids) for choice in self._choices)
        return {"prompt_tokens": prompts, "completion_tokens": generated, "total_tokens": prompts + generated}


def _shaped(index: int, text: str, logprobs: _Logprobs | None, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)
