"""Span attributes of an answer, by OpenTelemetry's conventions for generative AI: never its text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Self

from opentelemetry.trace import Span

from semel.core import Output, Submission
from semel.telemetry.spans import add_to_span

__all__ = ["Observed"]

_SAMPLING: Final[Mapping[str, str]] = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "n": "gen_ai.request.choice.count",
}


class Observed:
    """The counts of one submission's answer, which a span gets when it ends."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._tokens = 0
        self._reasons: list[str] = []
        self._ended = False

    @classmethod
    def begin(cls, span: Span, submission: Submission, model: str) -> Self | None:
        """Begin the counts of an answer; None if nobody will see the span."""
        if not span.is_recording():
            return None
        prompt = submission.prompt
        encoded = 0 if prompt.encoder_token_ids is None else len(prompt.encoder_token_ids)
        answered = "text_completion" if submission.parsing is None else "chat"
        span.set_attribute("gen_ai.operation.name", "embeddings" if submission.pools else answered)
        span.set_attribute("gen_ai.request.model", model)
        for name, attribute in _SAMPLING.items():
            if isinstance(value := submission.sampling.get(name), int | float):
                span.set_attribute(attribute, value)
        add_to_span(span, "gen_ai.usage.input_tokens", len(prompt.token_ids) + encoded)
        add_to_span(span, "semel.items", len(prompt.items))
        return cls(span)

    def take(self, output: Output) -> None:
        """Count what was generated."""
        if not self._tokens and output.token_ids and self._span.is_recording():
            self._span.add_event("first_token")
        self._tokens += len(output.token_ids)
        if output.cached_tokens is not None:
            add_to_span(self._span, "gen_ai.usage.cache_read.input_tokens", output.cached_tokens)
        if output.finish_reason is not None:
            self._reasons.append(output.finish_reason)

    def end(self) -> None:
        """Give the counts to the span. Ending twice does no harm."""
        if not self._ended:
            self._ended = True
            if self._span.is_recording():
                add_to_span(self._span, "gen_ai.usage.output_tokens", self._tokens)
                self._span.set_attribute("gen_ai.response.finish_reasons", self._reasons)
