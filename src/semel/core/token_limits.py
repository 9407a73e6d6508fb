"""Sampling parameters that may leave no token to go on with where an answer is held to a form (threats S31). Pure.

vLLM ends such a request with an error once its last token is excluded. What can do that: a list of allowed tokens,
excluded words, and a repetition penalty over which a float has no room. What cannot: a bias is limited to 100 either
way, and `min_tokens` gives way to the form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from semel.errors import InvalidRequest

__all__ = ["check_tokens_left"]

_EXCLUDING: Final = ("allowed_token_ids", "bad_words")
_MIN_PENALTY: Final = 0.01
_MAX_PENALTY: Final = 100.0


def check_tokens_left(sampling: Mapping[str, object], form: str) -> None:
    """Refuse what may leave no token that the structured output in the field `form` allows."""
    for name in _EXCLUDING:
        if sampling.get(name):
            raise InvalidRequest(
                f"{name} and {form}: together they may leave no token to go on with; leave one of the two out",
                param=name,
            )
    penalty = sampling.get("repetition_penalty")
    if isinstance(penalty, int | float) and not _MIN_PENALTY <= penalty <= _MAX_PENALTY:
        raise InvalidRequest(
            f"repetition_penalty and {form}: {penalty:g} may leave no token to go on with; with a structured output it "
            f"must be from {_MIN_PENALTY:g} to {_MAX_PENALTY:g}",
            param="repetition_penalty",
        )
