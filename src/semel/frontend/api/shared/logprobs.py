"""Log probabilities in OpenAI's two shapes: one entry per token for chats, four parallel lists for completions.

The engine reports the text of each token in its context, because the bytes of one character may span several tokens.
Where it does not, the tokenizer decodes each token alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from typing_extensions import TypedDict

from semel.core import Output
from semel.core import PromptLogprob as ReportedLogprob
from semel.frontend.api.shared.response_options import ResponseOptions

__all__ = [
    "LEAST",
    "ChatLogprobs",
    "Decode",
    "PromptLogprob",
    "PromptPositions",
    "Step",
    "TextLogprobs",
    "TokenLogprob",
    "TopLogprob",
    "append_steps",
    "chat_logprobs",
    "extend_logprobs",
    "no_logprobs",
    "prompt_logprobs",
    "prompt_steps",
    "steps_of",
]

Decode = Callable[[Sequence[int]], str]

PromptPositions = Sequence[Mapping[int, ReportedLogprob] | None]
"""The engine's report for each token of a prompt; None for the first."""

LEAST: Final = -9999.0
"""OpenAI's substitute for a log probability that JSON cannot represent."""


class TopLogprob(TypedDict):
    """One of the likeliest tokens."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TypedDict):
    """A token of a chat's answer, and the likeliest in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """One entry for each token."""

    content: list[TokenLogprob]


class TextLogprobs(TypedDict):
    """Four lists with an entry for each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(TypedDict):
    """The log probability of one token at a place of a prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass(frozen=True, slots=True)
class Step:
    """One token, and the log probabilities at its position. If known, the token's own comes first."""

    token: int
    logprobs: Mapping[int, float] | None
    texts: Mapping[int, str]

    def text(self, token: int, decode: Decode) -> str:
        """The text of a token."""
        found = self.texts.get(token)
        return decode([token]) if found is None else found


def steps_of(output: Output) -> list[Step]:
    """The steps of an output that has log probabilities."""
    texts: Iterable[Mapping[int, str]] = output.texts or ({} for _ in output.token_ids)
    known = zip(output.token_ids, output.logprobs or (), texts, strict=False)
    return [Step(token, logprobs, text) for token, logprobs, text in known]


def prompt_steps(token_ids: Sequence[int], positions: PromptPositions) -> list[Step]:
    """The steps of a prompt. Its first token has no log probabilities."""
    steps = []
    for token, entries in zip(token_ids, positions, strict=False):
        known = None if entries is None else {one: entry[0] for one, entry in entries.items()}
        texts = {one: entry[2] for one, entry in (entries or {}).items() if entry[2] is not None}
        steps.append(Step(token, known, texts))
    return steps


def chat_logprobs(output: Output, options: ResponseOptions, decode: Decode) -> list[TokenLogprob]:
    """The log probabilities of one output of a chat."""
    return [_entry(step, options, decode) for step in steps_of(output)]


def prompt_logprobs(positions: PromptPositions | None) -> list[dict[str, PromptLogprob] | None] | None:
    """The log probabilities of a prompt, in vLLM's shape."""
    return None if positions is None else [None if entries is None else _position(entries) for entries in positions]


def no_logprobs() -> TextLogprobs:
    """Empty log probabilities of a completion."""
    return {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}


def append_steps(
    logprobs: TextLogprobs, steps: Iterable[Step], options: ResponseOptions, decode: Decode, *, offset: int
) -> int:
    """Append steps whose text begins at `offset`. Returns the offset of the step after them."""
    for step in steps:
        text = _token_text(step, step.token, options, decode)
        logprobs["text_offset"].append(offset)
        logprobs["tokens"].append(text)
        known = step.logprobs
        logprobs["token_logprobs"].append(None if known is None else max(known[step.token], LEAST))
        logprobs["top_logprobs"].append(None if known is None else _top(step, known, options, decode))
        offset += len(text)
    return offset


def extend_logprobs(logprobs: TextLogprobs, more: TextLogprobs) -> None:
    """Append other log probabilities."""
    logprobs["text_offset"] += more["text_offset"]
    logprobs["token_logprobs"] += more["token_logprobs"]
    logprobs["tokens"] += more["tokens"]
    logprobs["top_logprobs"] += more["top_logprobs"]


def _position(entries: Mapping[int, ReportedLogprob]) -> dict[str, PromptLogprob]:
    return {
        str(token): {"logprob": max(logprob, LEAST), "rank": rank, "decoded_token": text}
        for token, (logprob, rank, text) in entries.items()
    }


def _top(step: Step, known: Mapping[int, float], options: ResponseOptions, decode: Decode) -> dict[str, float]:
    """Log probabilities by token text: one more than requested, because the token itself comes first."""
    count = None if options.top_logprobs is None else options.top_logprobs + 1
    return {
        _token_text(step, token, options, decode): max(logprob, LEAST)
        for token, logprob in islice(known.items(), count)
    }


def _entry(step: Step, options: ResponseOptions, decode: Decode) -> TokenLogprob:
    known = step.logprobs or {}
    return {
        "token": _token_text(step, step.token, options, decode),
        "logprob": max(known[step.token], LEAST),
        "bytes": list(step.text(step.token, decode).encode(errors="replace")),
        "top_logprobs": [
            _top_entry(_token_text(step, token, options, decode), logprob)
            for token, logprob in islice(known.items(), options.top_logprobs)
        ],
    }


def _top_entry(text: str, logprob: float) -> TopLogprob:
    return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(text.encode(errors="replace"))}


def _token_text(step: Step, token: int, options: ResponseOptions, decode: Decode) -> str:
    return f"token_id:{token}" if options.tokens_as_ids else step.text(token, decode)
