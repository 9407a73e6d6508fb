"""Answers in tokens, in the shapes of vLLM's `/inference/v1/generate`. Pure.

Fields that vLLM has and semel never fills are there, and null; so are the ranks of log probabilities.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from semel.core import Output, Prompt, PromptLogprob
from semel.frontend.api.logprobs import prompt_logprobs, steps_of
from semel.frontend.api.render_response import features_body
from semel.frontend.api.response_options import ALL, ResponseOptions
from semel.frontend.api.usage import Usage

__all__ = ["GenerateResponse"]

_LEAST: Final = -9999.0
_NOT_REPORTED: Final = dict.fromkeys(("routed_experts", "sampling_mask", "weight_versions"))
"""Of a choice."""

_UNKNOWN: Final = dict.fromkeys(
    (
        *("prompt_token_id_logprobs", "prompt_token_ids", "mm_placeholders"),
        *("metrics", "kv_transfer_params", "ec_transfer_params"),
    )
)
"""Of an answer, unless the prompt is to be shown."""


@dataclass(slots=True)
class _Choice:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    completion_tokens: int = 0


class GenerateResponse:
    """One answer, piece by piece as a stream or at the end as a whole."""

    def __init__(
        self,
        request_id: str,
        model: str,
        prompt: Prompt,
        *,
        count: int,
        showing: ResponseOptions,
        features: Mapping[str, Any] | None = None,
    ) -> None:
        self._request_id = request_id
        self._model = model
        self._showing = showing
        self._usage = Usage.of(prompt)
        # By these names what the client has sent can be named from now on; vLLM has no such field.
        named = {} if features is None else {"features": features}
        self._prompt = {**_prompt_part(prompt), **named} if showing.token_ids else named
        self._choices = [_Choice() for _ in range(count)]
        self._prompt_logprobs: Sequence[Mapping[int, PromptLogprob] | None] | None = None
        self._created = int(time.time())

    def add(self, output: Output) -> None:
        """Keep an output for the whole answer."""
        self._usage.add(output)
        self._prompt_logprobs = output.prompt_logprobs or self._prompt_logprobs
        choice = self._choices[output.index]
        choice.token_ids += output.token_ids
        if self._showing.logprobs:
            choice.logprobs += _logprobs(output, self._showing)
        if output.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_reason

    def whole(self) -> Mapping[str, Any]:
        """The answer in one piece."""
        return {
            **_UNKNOWN,
            "request_id": self._request_id,
            "model": self._model,
            "created": self._created,
            "usage": self._usage.whole(),
            "prompt_logprobs": prompt_logprobs(self._prompt_logprobs),
            **self._prompt,
            "output_mode": "tokens",
            "choices": [
                {
                    "index": index,
                    "logprobs": {"content": choice.logprobs} if self._showing.logprobs else None,
                    "finish_reason": choice.finish_reason or "stop",
                    "stop_reason": choice.stop_reason,
                    "token_ids": choice.token_ids,
                    **_NOT_REPORTED,
                }
                for index, choice in enumerate(self._choices)
            ],
        }

    def chunks(self, output: Output) -> Iterator[Mapping[str, Any]]:
        """The chunk of a stream that an output becomes, unless it has neither tokens nor an end."""
        self._usage.add(output)
        if not output.token_ids and output.finish_reason is None:
            return
        choice = self._choices[output.index]
        choice.completion_tokens += len(output.token_ids)
        shaped = {
            "index": output.index,
            "logprobs": {"content": _logprobs(output, self._showing)} if self._showing.logprobs else None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "token_ids": output.token_ids,
            **_NOT_REPORTED,
        }
        prompt, self._prompt = self._prompt, {}
        usage = self._running_usage(choice) if self._showing.running_usage else None
        yield {"request_id": self._request_id, "usage": usage, **prompt, "output_mode": "tokens", "choices": [shaped]}

    def closing(self) -> Iterator[Mapping[str, Any]]:
        """The chunk that closes a stream with what it cost, if that was asked for."""
        if self._showing.usage:
            yield {
                "request_id": self._request_id,
                "usage": self._usage.known(),
                "output_mode": "tokens",
                "choices": [],
            }

    def _running_usage(self, choice: _Choice) -> Mapping[str, Any]:
        prompt, made = self._usage.prompt_tokens, choice.completion_tokens
        details = dict.fromkeys(("prompt_tokens_details", "completion_tokens_details"))
        return {"prompt_tokens": prompt, "total_tokens": prompt + made, "completion_tokens": made, **details}


def _prompt_part(prompt: Prompt) -> Mapping[str, Any]:
    """The prompt as it was executed."""
    features = features_body(prompt)
    places = {} if features is None else features["mm_placeholders"]
    return {"prompt_token_ids": prompt.token_ids, "mm_placeholders": places or None}


def _logprobs(output: Output, showing: ResponseOptions) -> list[dict[str, Any]]:
    """For each token its own log probability, and the best ones: its own is the first of them."""
    entries = []
    for step in steps_of(output):
        known = step.logprobs or {}
        top = [
            {"token_id": token, "logprob": max(logprob, _LEAST), "rank": None}
            for number, (token, logprob) in enumerate(known.items())
            if showing.top_logprobs == ALL or number < max(showing.top_logprobs, 1)
        ]
        own = max(known.get(step.token, _LEAST), _LEAST)
        entries.append({"token_id": step.token, "logprob": own, "rank": None, "top_logprobs": top})
    return entries
