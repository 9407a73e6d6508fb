"""The optional parts of a response. A plain value, so that a stream can keep it without keeping the request."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ResponseOptions"]


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """The optional parts that a client requested."""

    logprobs: bool = False
    top_logprobs: int | None = 0
    """The number of log probabilities of each token; None for all that the engine reports."""

    tokens_as_ids: bool = False
    """True if log probabilities have `token_id:…` in place of token text, for tokens that are no text by themselves."""

    token_ids: bool = False
    reasoning: bool = True
    """If False, the response omits everything from which reasoning could be read."""

    usage: bool = False
    """True if a stream ends with its usage."""

    running_usage: bool = False
    """True if every chunk of a stream has the usage so far."""
