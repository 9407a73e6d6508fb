"""The inside of vLLM's parsers of answers, where semel touches it: what differs between releases of vLLM.

As in `compat`, every name is in one table (`names`), and is looked up before an engine loads.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

__all__ = [
    "always_adjusts",
    "count_parsed_calls",
    "make_tool_call_id",
    "parser_class",
    "reasoning_ended",
    "tell_prompt",
]


def parser_class(manager: Any, *, tokenizer: Any, **names: Any) -> Any:
    """Return vLLM's class that parses answers, by the names of its parsers; None if there is nothing to parse.

    Before 0.32 it does not look whether a parser takes the tokenizer: the first answer would tell.
    """
    if "tokenizer" in inspect.signature(manager.get_parser).parameters:
        names["tokenizer"] = tokenizer
    return manager.get_parser(**names)


def always_adjusts(kind: Any) -> bool:
    """Return whether a class of parsers changes every request. Before 0.32 none without reasoning and tools does."""
    return bool(getattr(kind, "always_adjust_request", False))


def tell_prompt(parser: Any, prompt_ids: Sequence[int]) -> None:
    """Let a parser know the prompt, if it can; before 0.32 none of them uses it for a whole answer."""
    if hasattr(parser, "set_prompt_token_ids"):
        parser.set_prompt_token_ids(prompt_ids)


def reasoning_ended(request: Any, parser: Any, prompt_ids: list[int]) -> bool | None:
    """Return the engine's argument about an answer's reasoning. Before 0.32 this was in the middle of vLLM's server."""
    if hasattr(request, "resolve_reasoning_ended"):
        ended: bool | None = request.resolve_reasoning_ended(parser, prompt_ids)
        return ended
    if not request.include_reasoning or request._grammar_from_parser:
        return True
    if parser is None or parser.reasoning_parser is None:
        return None
    return bool(parser.is_reasoning_end(prompt_ids))


def make_tool_call_id() -> str:
    """Return an id for a call that the model gave none."""
    try:
        from vllm.renderers.chat_utils import make_tool_call_id as make
    except ImportError:  # before 0.32
        from vllm.entrypoints.chat_utils import make_tool_call_id as make
    return str(make())


def count_parsed_calls(model: str) -> None:
    """Let vLLM's parsers of tool calls count what they find, as they do in its server; where this vLLM does so."""
    try:
        from vllm.parser.metrics import init_parser_metrics
    except ImportError:
        return
    init_parser_metrics(model_name=model)
