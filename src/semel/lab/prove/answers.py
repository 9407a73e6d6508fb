"""Answers as they are compared, and the table of bare vLLM's: each question is asked once, alone.

Texts and token ids of an answer have to be the same. A question whose reference has two most likely tokens that are
nearly equal has no right answer on a machine whose sums depend on the batch: it is left out, and counted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from semel.errors import ConfigError
from semel.lab.prove.plan import Ask, Media, Question, bodies

__all__ = ["Answer", "References", "ask_references", "events", "parse_stream", "parse_whole"]

_TIE: Final = 1e-3
"""Of log probabilities."""

Post = Callable[[str, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Sends a body to a path; raises if it is not answered."""


@dataclass(slots=True)
class Answer:
    """The text and the token ids of each sequence; Responses have no ids."""

    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)

    def differing(self, expected: Answer) -> int:
        """Count the tokens that differ, at least one if anything does."""
        pairs = [(self.tokens.get(index, []), expected.tokens.get(index, [])) for index in expected.texts]
        count = sum(
            sum(one != other for one, other in zip(mine, theirs, strict=False)) + abs(len(mine) - len(theirs))
            for mine, theirs in pairs
        )
        return max(count, int(self.texts != expected.texts))

    def begins(self, expected: Answer) -> bool:
        """Return whether it is the beginning of another one."""
        return all(expected.texts.get(index, "").startswith(text) for index, text in self.texts.items()) and all(
            expected.tokens.get(index, [])[: len(ids)] == ids for index, ids in self.tokens.items()
        )


def parse_whole(body: Mapping[str, Any]) -> Answer:
    """Return the answer that a whole body has."""
    answer = Answer()
    for choice in body.get("choices", ()):
        answer.texts[choice["index"]] = choice["message"].get("content") or ""
        answer.tokens[choice["index"]] = list(choice.get("token_ids") or ())
    if "output" in body:
        answer.texts[0] = "".join(
            part.get("text", "") for item in body["output"] for part in item.get("content") or () if part
        )
    return answer


def events(text: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream, without its closing mark."""
    for line in text.splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def parse_stream(text: str) -> tuple[Answer, str]:
    """Return the answer of a stream, and what is wrong with its end: an error, or that there is none."""
    answer, error, is_complete = Answer(), "", "data: [DONE]" in text
    for event in events(text):
        if event.get("error") or event.get("type") in ("error", "response.failed"):
            error = json.dumps(event)[:300]
        for choice in event.get("choices", ()):
            index = choice["index"]
            answer.texts[index] = answer.texts.get(index, "") + (choice["delta"].get("content") or "")
            answer.tokens.setdefault(index, []).extend(choice.get("token_ids") or ())
        if event.get("type") == "response.output_text.delta":
            answer.texts[0] = answer.texts.get(0, "") + event["delta"]
        is_complete |= event.get("type") in ("response.completed", "response.incomplete")
    return answer, error or ("" if is_complete else "the stream has no end")


@dataclass(slots=True)
class References:
    """The answers to questions, by their keys."""

    answers: dict[str, Answer] = field(default_factory=dict)
    ties: set[str] = field(default_factory=set)

    def expected(self, question: Question) -> Answer | None:
        """Return the answer to a question; None for a tie."""
        return None if question.key in self.ties else self.answers[question.key]

    def write(self, path: Path, made_by: str) -> None:
        """Write the table, so that another run of the same model, flags and seed needs no bare server."""
        answers = {key: [list(one.texts.items()), list(one.tokens.items())] for key, one in self.answers.items()}
        path.write_text(json.dumps({"made_by": _hash(made_by), "answers": answers, "ties": sorted(self.ties)}))

    @classmethod
    def read(cls, path: Path, made_by: str) -> References:
        """Read a table; raises `ConfigError` if it is of another model, other flags or another seed."""
        table = json.loads(path.read_text())
        if table["made_by"] != _hash(made_by):
            raise ConfigError(f"{path} has the answers of another model, other flags or another seed")
        answers = {key: Answer(dict(texts), dict(tokens)) for key, (texts, tokens) in table["answers"].items()}
        return cls(answers, set(table["ties"]))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


async def ask_references(
    post: Post, questions: Sequence[Question], media: Media, tenant: str = "", *, is_bare: bool = True
) -> References:
    """Ask every question once, one after another: bare vLLM, or a fleet whose answers have no log probabilities."""
    found = References()
    for number, question in enumerate(questions):
        previous: dict[str, Any] = {}
        body: Mapping[str, Any] = {}
        for path, turn in bodies(Ask(number, tenant, question), media, is_bare=is_bare):
            body = await post(path, turn | previous)
            previous = {"previous_response_id": body.get("id")}
        found.answers[question.key] = parse_whole(body)
        if _least_margin(body) < _TIE:
            found.ties.add(question.key)
    return found


def _least_margin(body: Mapping[str, Any]) -> float:
    """Return the smallest distance between the two most likely tokens of any place."""
    places = [one for choice in body.get("choices", ()) for one in (choice.get("logprobs") or {}).get("content") or ()]
    likely = [sorted((other["logprob"] for other in place["top_logprobs"]), reverse=True)[:2] for place in places]
    return min((pair[0] - pair[1] for pair in likely if len(pair) == 2), default=1.0)
