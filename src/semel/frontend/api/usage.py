"""What an answer cost, as OpenAI's clients read it: tokens of the prompt and of the answer, and which of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from semel.core import Output, Prompt

__all__ = ["Usage", "modality_tokens"]


def modality_tokens(prompt: Prompt) -> dict[str, int]:
    """How many of a prompt's tokens are the items' of each modality."""
    counts: dict[str, int] = {}
    for item, placeholder in zip(prompt.items, prompt.timeline, strict=True):
        counts[item.modality] = counts.get(item.modality, 0) + placeholder.length
    return counts


@dataclass(slots=True)
class Usage:
    """Tokens so far."""

    prompt_tokens: int
    multimodal_tokens: Mapping[str, int] = field(default_factory=dict)
    completion_tokens: int = 0
    cached_tokens: int | None = None
    created_cache_tokens: int | None = None
    reasoning_tokens: int | None = None

    @classmethod
    def of(cls, prompt: Prompt) -> Self:
        """That of a prompt, before its answer."""
        encoded = 0 if prompt.encoder_token_ids is None else len(prompt.encoder_token_ids)
        return cls(len(prompt.token_ids) + encoded, modality_tokens(prompt))

    def add(self, output: Output) -> None:
        """Count what was generated, and what the engine tells of the prompt."""
        self.completion_tokens += len(output.token_ids)
        if output.cached_tokens is not None:
            self.cached_tokens = (self.cached_tokens or 0) + output.cached_tokens
        if output.created_cache_tokens is not None:
            self.created_cache_tokens = (self.created_cache_tokens or 0) + output.created_cache_tokens
        if output.reasoning_tokens is not None:
            self.reasoning_tokens = (self.reasoning_tokens or 0) + output.reasoning_tokens

    def totals(self) -> dict[str, Any]:
        """The three numbers."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
        }

    def whole(self) -> dict[str, Any]:
        """The numbers with their details; a detail that is not known is null."""
        prompt: dict[str, Any] = {
            "cached_tokens": self.cached_tokens,
            "created_cache_tokens": self.created_cache_tokens,
            "multimodal_tokens": dict(self.multimodal_tokens) or None,
        }
        if "audio" in self.multimodal_tokens:
            prompt["audio_tokens"] = self.multimodal_tokens["audio"]  # OpenAI's name for the same
        reasoning = None if self.reasoning_tokens is None else {"reasoning_tokens": self.reasoning_tokens}
        return {**self.totals(), "prompt_tokens_details": prompt, "completion_tokens_details": reasoning}

    def known(self) -> dict[str, Any]:
        """The same without what is not known: so streams end."""
        return {
            name: {one: count for one, count in value.items() if count is not None}
            if isinstance(value, dict)
            else value
            for name, value in self.whole().items()
            if value is not None
        }
