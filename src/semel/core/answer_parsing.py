"""What the tool and reasoning parsers need from a chat request. They run in the worker. Names are OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["AnswerParsing"]


@dataclass(frozen=True, slots=True)
class AnswerParsing:
    """How to parse the answer to a chat: which tool calls it may contain, and whether reasoning is separate."""

    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] = "none"
    """`none`, `auto`, `required`, or the one function to call."""

    parallel_tool_calls: bool = True
    past_tool_calls: int = 0
    """Tool calls in the chat so far; some models continue the numbering of call ids."""

    response_format: Mapping[str, Any] | None = None
    include_reasoning: bool = True
    reasoning_effort: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template; some of them turn reasoning on or off."""

    stream: bool = False
    """Whether the answer is parsed incrementally."""
