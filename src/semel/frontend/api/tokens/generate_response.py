"""Responses in tokens, in the shapes of vLLM's `/inference/v1/generate`. Pure.

Fields that vLLM has and semel never fills are present and null. The ranks of log probabilities are null too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from semel.core import DEFAULT_WEIGHTS, Modality, Output, Prompt
from semel.frontend.api.shared.logprobs import LEAST, PromptLogprob, PromptPositions, prompt_logprobs, steps_of
from semel.frontend.api.shared.response_options import ResponseOptions
from semel.frontend.api.shared.usage import StreamedUsage, Usage, UsageCounter
from semel.frontend.api.tokens.render_response import RenderedFeatures, RenderedPlace, places_of

__all__ = [
    "GenerateResponse",
    "Generated",
    "GeneratedChoice",
    "GeneratedChunk",
    "RankedLogprob",
    "TokenIdLogprob",
    "TokenIdLogprobs",
    "WeightVersion",
]


class RankedLogprob(TypedDict):
    """One of the likeliest tokens, by its id."""

    token_id: int
    logprob: float
    rank: None


class TokenIdLogprob(TypedDict):
    """A token by its id, and the likeliest in its place."""

    token_id: int
    logprob: float
    rank: None
    top_logprobs: list[RankedLogprob]


class TokenIdLogprobs(TypedDict):
    """One entry for each token."""

    content: list[TokenIdLogprob]


class WeightVersion(TypedDict):
    """Tokens from `start` to before `end` were sampled with these weights."""

    version: str
    start: int
    end: int


class GeneratedChoice(TypedDict):
    """One of the `n` answers, or more of it, in tokens."""

    index: int
    logprobs: TokenIdLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: Sequence[int]
    routed_experts: None
    sampling_mask: None
    weight_versions: list[WeightVersion] | None


class Generated(TypedDict):
    """How a rendered prompt goes on, in tokens."""

    request_id: str
    model: str
    created: int
    usage: Usage
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None
    prompt_token_id_logprobs: None
    prompt_token_ids: Sequence[int] | None
    mm_placeholders: dict[Modality, list[RenderedPlace]] | None
    metrics: None
    kv_transfer_params: None
    ec_transfer_params: None
    features: NotRequired[RenderedFeatures]
    output_mode: Literal["tokens"]
    choices: list[GeneratedChoice]


class GeneratedChunk(TypedDict):
    """More of how a rendered prompt goes on, in tokens."""

    request_id: str
    usage: StreamedUsage | None
    prompt_token_ids: NotRequired[Sequence[int]]
    mm_placeholders: NotRequired[dict[Modality, list[RenderedPlace]] | None]
    features: NotRequired[RenderedFeatures]
    output_mode: Literal["tokens"]
    choices: list[GeneratedChoice]


class _PromptPart(TypedDict, total=False):
    """What an answer, or the first chunk of one, tells of its prompt."""

    prompt_token_ids: Sequence[int]
    mm_placeholders: dict[Modality, list[RenderedPlace]] | None
    features: RenderedFeatures


@dataclass(slots=True)
class _Choice:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenIdLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    completion_tokens: int = 0
    weight_versions: list[WeightVersion] | None = None

    def finish(self, output: Output, tokens: int) -> None:
        """Take what the last output tells; the sequence has so many tokens."""
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        spans = output.weight_versions or (((DEFAULT_WEIGHTS, 0, tokens),) if tokens else ())
        self.weight_versions = [{"version": version, "start": start, "end": end} for version, start, end in spans]


class GenerateResponse:
    """Builds one token response: chunk by chunk for a stream, or complete at the end."""

    def __init__(
        self,
        request_id: str,
        model: str,
        prompt: Prompt,
        *,
        count: int,
        options: ResponseOptions,
        features: RenderedFeatures | None = None,
    ) -> None:
        self._request_id = request_id
        self._model = model
        self._options = options
        self._usage = UsageCounter.of(prompt)
        self._prompt: _PromptPart = {}
        if options.token_ids:
            self._prompt = {"prompt_token_ids": prompt.token_ids, "mm_placeholders": places_of(prompt) or None}
        if features is not None:
            # The client can name the items that it sent by these digests from now on. vLLM has no such field.
            self._prompt["features"] = features
        self._choices = [_Choice() for _ in range(count)]
        self._prompt_logprobs: PromptPositions | None = None
        self._created = int(time.time())

    def add(self, output: Output) -> None:
        """Collect an output for the complete response."""
        self._usage.add(output)
        self._prompt_logprobs = output.prompt_logprobs or self._prompt_logprobs
        choice = self._choices[output.index]
        choice.token_ids += output.token_ids
        if self._options.logprobs:
            choice.logprobs += _logprobs(output, self._options)
        if output.finish_reason is not None:
            choice.finish(output, len(choice.token_ids))

    def whole(self) -> Generated:
        """The complete response."""
        return {
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": None,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "request_id": self._request_id,
            "model": self._model,
            "created": self._created,
            "usage": self._usage.whole(),
            "prompt_logprobs": prompt_logprobs(self._prompt_logprobs),
            **self._prompt,
            "output_mode": "tokens",
            "choices": [self._whole_choice(index, choice) for index, choice in enumerate(self._choices)],
        }

    def chunks(self, output: Output) -> Iterator[GeneratedChunk]:
        """The chunk for one output; none if it has neither tokens nor a finish reason."""
        self._usage.add(output)
        if not output.token_ids and output.finish_reason is None:
            return
        choice = self._choices[output.index]
        choice.completion_tokens += len(output.token_ids)
        if output.finish_reason is not None:
            choice.finish(output, choice.completion_tokens)
        shaped: GeneratedChoice = {
            "index": output.index,
            "logprobs": {"content": _logprobs(output, self._options)} if self._options.logprobs else None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "token_ids": output.token_ids,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": choice.weight_versions,
        }
        prompt, self._prompt = self._prompt, {}
        usage = self._running_usage(choice) if self._options.running_usage else None
        yield {"request_id": self._request_id, "usage": usage, **prompt, "output_mode": "tokens", "choices": [shaped]}

    def closing(self) -> Iterator[GeneratedChunk]:
        """The last chunk of a stream, with its usage, if the client requested it."""
        if self._options.usage:
            yield {"request_id": self._request_id, "usage": self._usage.known(), "output_mode": "tokens", "choices": []}

    def _whole_choice(self, index: int, choice: _Choice) -> GeneratedChoice:
        return {
            "index": index,
            "logprobs": {"content": choice.logprobs} if self._options.logprobs else None,
            "finish_reason": choice.finish_reason or "stop",
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": choice.weight_versions,
        }

    def _running_usage(self, choice: _Choice) -> StreamedUsage:
        usage = self._usage.running(choice.completion_tokens)
        usage["prompt_tokens_details"] = usage["completion_tokens_details"] = None
        return usage


def _logprobs(output: Output, options: ResponseOptions) -> list[TokenIdLogprob]:
    """For each token its own log probability and the top ones. Its own comes first."""
    count = None if options.top_logprobs is None else max(options.top_logprobs, 1)
    entries: list[TokenIdLogprob] = []
    for step in steps_of(output):
        known = step.logprobs or {}
        top = [_ranked(token, logprob) for token, logprob in islice(known.items(), count)]
        own = max(known.get(step.token, LEAST), LEAST)
        entries.append({"token_id": step.token, "logprob": own, "rank": None, "top_logprobs": top})
    return entries


def _ranked(token_id: int, logprob: float) -> RankedLogprob:
    return {"token_id": token_id, "logprob": max(logprob, LEAST), "rank": None}
