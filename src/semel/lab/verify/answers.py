"""Answers of a server, and how far two of them are apart. Pure.

Two answers are equal if their prompts have the same tokens and so do they. A GPU is not exact: the same question asked
twice may differ in its log probabilities, and a draw between two tokens may end otherwise. So bare vLLM is asked twice,
and what it differs from itself by is what semel may differ from it by.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final

__all__ = ["Answer", "Refusal", "Reply", "distance", "is_equal", "reply_of", "tolerance_of"]

_EXACT: Final = 1e-4
"""Log probabilities that differ by less are equal: JSON has rounded them."""

_SLACK: Final = 3.0
"""semel may differ by so many times what bare vLLM differs from itself by: it was asked twice only."""

_WIDEST: Final = 0.5
"""A server that differs from itself by more proves nothing."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens of a prompt, of its answer, and the log probabilities of those that came first at each place."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[Mapping[str, float], ...]
    """By the text of a token, at each place of the answer."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The error of a server that gave no answer."""

    status: int
    message: str

    @property
    def is_the_client_s(self) -> bool:
        """Return whether the request was at fault: two such refusals are alike, a server's own failures are not."""
        return 400 <= self.status < 500


Reply = Answer | Refusal


def reply_of(status: int, body: bytes) -> Reply:
    """Return what a server answered a chat that asked for token ids and log probabilities."""
    try:
        parsed = json.loads(body)
    except ValueError:
        return Refusal(status, "the answer is no JSON")
    if status != 200:
        return Refusal(status, _message_of(parsed))
    choice = parsed["choices"][0]
    content = (choice.get("logprobs") or {}).get("content") or []
    if parsed.get("prompt_token_ids") is None or choice.get("token_ids") is None:
        return Refusal(status, "the answer has no token ids: the server does not know `return_token_ids`")
    return Answer(
        tuple(parsed["prompt_token_ids"]),
        tuple(choice["token_ids"]),
        tuple({one["token"]: float(one["logprob"]) for one in (*place["top_logprobs"], place)} for place in content),
    )


def _message_of(parsed: Any) -> str:
    error = parsed.get("error", parsed) if isinstance(parsed, dict) else parsed
    return str(error.get("message", error) if isinstance(error, dict) else error)


def distance(one: Reply, other: Reply, tie: float = _EXACT) -> float:
    """By how much the log probabilities of two answers differ at most; infinite if their tokens do.

    A place where both tokens are as likely as each other, but for `tie`, is a draw: what follows is not compared.
    """
    if isinstance(one, Refusal) and isinstance(other, Refusal):
        return 0.0 if one.is_the_client_s and other.is_the_client_s else math.inf
    if isinstance(one, Refusal) or isinstance(other, Refusal):
        return math.inf
    if one.prompt != other.prompt:
        return math.inf
    farthest = 0.0
    places = zip_longest(one.tokens, other.tokens, one.logprobs, other.logprobs)
    for mine, theirs, my_logprobs, their_logprobs in places:
        if my_logprobs is None or their_logprobs is None:
            if mine != theirs:
                return math.inf
            continue
        known = my_logprobs.keys() & their_logprobs.keys()
        farthest = max([farthest, *(abs(my_logprobs[name] - their_logprobs[name]) for name in known)])
        if mine != theirs:
            return farthest if known and _is_draw(my_logprobs, tie) and _is_draw(their_logprobs, tie) else math.inf
        if not known:
            return math.inf
    return farthest


def _is_draw(logprobs: Mapping[str, float], tie: float) -> bool:
    best = sorted(logprobs.values(), reverse=True)[:2]
    return len(best) == 2 and best[0] - best[1] <= 2 * tie


def is_equal(one: Reply, other: Reply, tolerance: float) -> bool:
    """Return whether two answers are the same but for a tolerance."""
    return distance(one, other, tolerance) <= tolerance


def tolerance_of(distances: Iterable[float]) -> float:
    """Return what semel may differ by, of what bare vLLM differs from itself by; infinite if that proves nothing."""
    own = max(distances, default=0.0)
    if own <= _EXACT:
        return _EXACT
    return _SLACK * own if _SLACK * own <= _WIDEST else math.inf
