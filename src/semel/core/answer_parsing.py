"""What of a chat the parsers of tools and reasoning look at: they run where the engine is. Under OpenAI's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["AnswerParsing"]


@dataclass(frozen=True, slots=True)
class AnswerParsing:
    """How the answer to a chat is to be read: which calls it may make, and whether its reasoning is told apart."""

    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] = "none"
    """none, auto, required, or the one function to call."""

    parallel_tool_calls: bool = True
    past_tool_calls: int = 0
    """Calls in the chat so far: the ids of some models' calls go on counting."""

    response_format: Mapping[str, Any] | None = None
    include_reasoning: bool = True
    reasoning_effort: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The chat template's: some switch reasoning on or off."""

    stream: bool = False
    """Whether the answer is read piece by piece."""
