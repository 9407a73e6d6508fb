"""What an answer shows besides its text. A plain value: a stream keeps it, and lets go of the request."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ResponseOptions"]


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """What was asked to be shown."""

    logprobs: bool = False
    top_logprobs: int | None = 0
    """How many log probabilities of each token; None for all that the engine reports."""

    tokens_as_ids: bool = False
    """Whether tokens in log probabilities are shown by number, for those that are no text by themselves."""

    token_ids: bool = False
    reasoning: bool = True
    """Without it nothing is shown that reasoning could be read from."""

    usage: bool = False
    """Whether a stream ends with what it cost."""

    running_usage: bool = False
    """Whether every chunk of it says so."""
