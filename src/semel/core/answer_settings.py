"""What of a worker's files and flags changes its answers beside the features that it is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

__all__ = ["AnswerSettings"]

_NONE: Final[Mapping[str, object]] = {}


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """Workers of one fleet have the same, or a client would get other answers from one of them."""

    weights: str = ""
    """A hash of the weights' headers, sizes, samples and revision, and how they are loaded and quantized."""

    tool_call_parser: str | None = None
    enable_auto_tool_choice: bool = False
    tool_strict_level: str = "auto"
    reasoning_parser: str | None = None
    parser_plugins: Mapping[str, str] = field(default_factory=lambda: dict[str, str]())
    """A hash of each plug-in's file, by the file's name."""

    generation_config: Mapping[str, object] = field(default_factory=lambda: _NONE)
    """The sampling parameters of a request that names none."""

    chat_template: str = ""
    """A hash of the chat template in the model folder."""
