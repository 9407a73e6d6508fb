"""Where an answer of semel may differ from bare vLLM's to the same request, and why: all of it, and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

__all__ = ["DIFFERENCES", "comparable", "flat", "joined"]

DIFFERENCES: Final[Mapping[str, str]] = {
    r"^id$": "each server names its requests",
    r"^created$": "the second in which it answered",
    r"^system_fingerprint$": "names the system, and this is another one",
    r"\.tool_calls\.\d+\.id$": "random, made by the parser for each call",
    r"^usage\.prompt_tokens_details\.(created_)?cache(d)?_tokens$": (
        "of several sequences or prompts at once it depends on which is computed first; of a list of prompts vLLM "
        "tells one prompt's, semel the sum; of completions semel tells what was put into the cache as well"
    ),
    r"^usage\.prompt_tokens_details\.audio_tokens$": "OpenAI's name for what vLLM tells as multimodal_tokens.audio",
}
"""Of one answer in JSON: paths, and the reason.

Beyond it: how a stream is cut into chunks depends on who reads how fast, so streams are joined before they are
compared, and running usage with them (semel counts reasoning at the end, where vLLM counts all of it again with every
token). Prompt token details are always told; vLLM wants --enable-prompt-tokens-details, with which it is run here.
Errors have the same status, and so the same exception class; their texts and codes are semel's own: OpenAI's codes
where it has one, where vLLM repeats the status. What vLLM ignores because it does not know it, semel refuses by name.
"""

_CACHED: Final = re.compile(next(path for path in DIFFERENCES if "cache" in path))


def comparable(answer: Mapping[str, Any], *, cached: bool = True) -> dict[str, Any]:
    """The answer flat, by path, without what may differ; `cached` tokens are compared where they are no chance."""
    fields = flat(answer)
    allowed = [re.compile(path) for path in DIFFERENCES if not (cached and path == _CACHED.pattern)]
    return {path: value for path, value in fields.items() if not any(one.search(path) for one in allowed)}


def joined(chunks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a stream says in all, however it is cut."""
    whole: dict[str, Any] = {"choices": {}, "heads": {}, "usage": None}
    for chunk in chunks:
        whole["heads"][(chunk["id"] is not None, chunk["object"], chunk["model"])] = True
        whole["usage"] = chunk.get("usage") if not chunk["choices"] else whole["usage"]
        if chunk.get("prompt_token_ids") is not None:
            whole["prompt_token_ids"] = chunk["prompt_token_ids"]
        for choice in chunk["choices"]:
            _join(whole["choices"].setdefault(choice["index"], {}), choice)
    whole["has_fingerprint"] = chunks[-1].get("system_fingerprint") is not None
    return whole


def _join(kept: dict[str, Any], choice: Mapping[str, Any]) -> None:
    for name, value in (choice.get("delta") or {"text": choice.get("text")}).items():
        if name == "tool_calls":
            for call in value or ():
                _join_call(kept.setdefault("tool_calls", {}).setdefault(call["index"], {}), call)
        elif value is not None:
            kept[name] = kept.get(name, "") + value
    for name in ("finish_reason", "stop_reason", "prompt_token_ids"):
        if choice.get(name) is not None:
            kept[name] = choice[name]
    if choice.get("token_ids") is not None:
        kept["token_ids"] = kept.get("token_ids", []) + list(choice["token_ids"])
    for name, entries in (choice.get("logprobs") or {}).items():
        if entries is not None:
            kept.setdefault("logprobs", {}).setdefault(name, []).extend(entries)


def _join_call(kept: dict[str, Any], call: Mapping[str, Any]) -> None:
    kept["has_id"] = kept.get("has_id", False) or call.get("id") is not None
    for name, value in (call.get("function") or {}).items():
        if value is not None:
            kept[name] = kept.get(name, "") + value


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """The leaves of a value by their paths; of what has parts, that it has some."""
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)  # type: ignore[assignment]
    else:
        return {path.removeprefix("."): value}
    fields = {path.removeprefix("."): type(value).__name__ if not value else "…"}
    for name, part in parts:
        fields |= flat(part, f"{path}.{name}")
    return fields
