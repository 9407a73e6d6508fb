"""Log probabilities in OpenAI's two shapes: one entry per token for chats, four parallel lists for completions.

The engine tells how tokens read, in their context: bytes of one character may be several tokens. Where it does not, the
tokenizer is asked for each token by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from semel.core import Output, PromptLogprob
from semel.frontend.api.response_options import ALL, ResponseOptions

__all__ = ["Decode", "Step", "TextLogprobs", "chat_logprobs", "prompt_logprobs", "prompt_steps", "steps_of"]

Decode = Callable[[Sequence[int]], str]

_LEAST: Final = -9999.0
"""OpenAI's for what JSON has no number for."""


@dataclass(frozen=True, slots=True)
class Step:
    """One token, and the log probabilities at its place: its own first, if they are known."""

    token: int
    logprobs: Mapping[int, float] | None
    texts: Mapping[int, str]

    def text(self, token: int, decode: Decode) -> str:
        """How a token reads."""
        found = self.texts.get(token)
        return decode([token]) if found is None else found


def steps_of(output: Output) -> list[Step]:
    """The steps of an output for which log probabilities were asked."""
    texts: Iterable[Mapping[int, str]] = output.texts or ({} for _ in output.token_ids)
    known = zip(output.token_ids, output.logprobs or (), texts, strict=False)
    return [Step(token, logprobs, text) for token, logprobs, text in known]


def prompt_steps(token_ids: Sequence[int], by_position: Sequence[Mapping[int, PromptLogprob] | None]) -> list[Step]:
    """The steps of a prompt; nothing is known of its first token."""
    steps = []
    for token, entries in zip(token_ids, by_position, strict=False):
        known = None if entries is None else {one: entry[0] for one, entry in entries.items()}
        texts = {one: entry[2] for one, entry in (entries or {}).items() if entry[2] is not None}
        steps.append(Step(token, known, texts))
    return steps


def chat_logprobs(output: Output, showing: ResponseOptions, decode: Decode) -> list[dict[str, Any]]:
    """Those of an output of a chat."""
    return [_entry(step, showing, decode) for step in steps_of(output)]


def prompt_logprobs(by_position: Sequence[Mapping[int, PromptLogprob] | None] | None) -> list[Any] | None:
    """Those of a prompt, as vLLM shows them."""
    if by_position is None:
        return None
    return [
        entries
        and {
            str(token): {"logprob": max(logprob, _LEAST), "rank": rank, "decoded_token": text}
            for token, (logprob, rank, text) in entries.items()
        }
        for entries in by_position
    ]


@dataclass(slots=True)
class TextLogprobs:
    """OpenAI's four parallel lists."""

    text_offset: list[int] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)

    def add(self, steps: Iterable[Step], showing: ResponseOptions, decode: Decode, *, offset: int) -> int:
        """Take in steps whose text begins at `offset`; where the next one begins."""
        for step in steps:
            text = _token_text(step, step.token, showing, decode)
            self.text_offset.append(offset)
            self.tokens.append(text)
            known = step.logprobs
            self.token_logprobs.append(None if known is None else max(known[step.token], _LEAST))
            self.top_logprobs.append(None if known is None else _top(step, known, showing, decode))
            offset += len(text)
        return offset

    def extend(self, other: TextLogprobs) -> None:
        """Go on with others."""
        self.text_offset += other.text_offset
        self.token_logprobs += other.token_logprobs
        self.tokens += other.tokens
        self.top_logprobs += other.top_logprobs


def _top(step: Step, known: Mapping[int, float], showing: ResponseOptions, decode: Decode) -> dict[str, float]:
    """By text, with one more than was asked for: the token itself comes first."""
    return {
        _token_text(step, token, showing, decode): max(logprob, _LEAST)
        for number, (token, logprob) in enumerate(known.items())
        if showing.top_logprobs == ALL or number <= showing.top_logprobs
    }


def _entry(step: Step, showing: ResponseOptions, decode: Decode) -> dict[str, Any]:
    known = step.logprobs or {}
    top = [
        {"token": text, "logprob": max(logprob, _LEAST), "bytes": list(text.encode(errors="replace"))}
        for number, (token, logprob) in enumerate(known.items())
        if (showing.top_logprobs == ALL or number < showing.top_logprobs)
        and (text := _token_text(step, token, showing, decode)) is not None
    ]
    return {
        "token": _token_text(step, step.token, showing, decode),
        "logprob": max(known[step.token], _LEAST),
        "bytes": list(step.text(step.token, decode).encode(errors="replace")),
        "top_logprobs": top,
    }


def _token_text(step: Step, token: int, showing: ResponseOptions, decode: Decode) -> str:
    return f"token_id:{token}" if showing.tokens_as_ids else step.text(token, decode)
