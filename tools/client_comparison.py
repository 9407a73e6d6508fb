"""What one client made of the answers of semel and of bare vLLM, compared field by field. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from tests.serve.differences import flat

REQUESTS: Final = ("text", "image", "stream", "tools", "structured")
"""What every client is made to send, if it can."""


class Reply(msgspec.Struct, frozen=True):
    """A line of a driver: what the client returned for a request, or the error that it raised."""

    api: str
    request: str
    answer: Any = None
    error: str | None = None


@dataclass(frozen=True)
class Difference:
    """Where answers may differ, and why."""

    path: str
    """A regular expression, searched in the path of a field."""

    reason: str
    where: str = ""
    """A regular expression, searched in "CLIENT API REQUEST". Empty: everywhere."""

    ours: tuple[Any, ...] = ()
    """What semel may have there, if vLLM has something else. Empty: anything."""


ABSENT: Final = "(absent)"
ERROR: Final = r"(?!)"
"""In place of a path, and matches none: vLLM refuses the request, and semel answers it."""

DIFFERENCES: Final = (
    Difference(r"(^|[._])id$", "ids of answers, items and calls are random, or made by each server"),
    Difference(r"(^|\.)(created|created_at|completed_at)$", "the time of the answer"),
    Difference(r"(^|\.)store$", "vLLM's responses do not say whether they are stored", ours=(True, False)),
    Difference(r"(^|\.)system_fingerprint$", "names the system, and this is another one"),
    Difference(
        r"(^|\.)((ec|kv)_transfer_params|(in|out)put_messages|\w+_per_turn(\.\d+)?|tool_output_tokens)$",
        "fields of vLLM that OpenAI's API does not have; semel leaves them out",
        where=" responses ",
        ours=(ABSENT,),
    ),
    Difference(
        r"(^|\.)(\w+_penalty|top_p|(top_)?logprobs|service_tier|metadata|reasoning(\.\w+)?)$",
        "fields that the request did not have: vLLM fills in its defaults, semel OpenAI's: null, an empty list or "
        "object",
        where=" responses ",
        ours=(None, 0, False, "list", "dict", "…", ABSENT),
    ),
    Difference(
        r"(^|\.)(output\.\d+\.status|final\.type|events\.\d+)$",
        "an answer that is cut at `max_output_tokens` is `incomplete`, as OpenAI's are; vLLM says "
        "`completed` of its message and its stream",
        where=" responses ",
        ours=("incomplete", "response.incomplete"),
    ),
    Difference(
        r"(^|\.)tool_choice$",
        "without tools: `auto`, OpenAI's default; vLLM says `none`",
        where=" responses (text|image|stream|structured)",
        ours=("auto",),
    ),
    Difference(
        r"(^|\.)created_cache_tokens$",
        "of completions vLLM does not say what was put into the prefix cache",
        where=" completions ",
    ),
    Difference(
        ERROR,
        "litellm does not pass `strict` on, so that the tiny model's arguments may be a number: vLLM answers with 400, "
        "semel with an empty object",
        where="^litellm messages (tools|structured)$",
    ),
    Difference(
        r"(^|\.)sequence_number$", "how a stream is cut into events depends on who reads how fast", where=" stream$"
    ),
)


@dataclass(frozen=True)
class Verdict:
    """How two replies to one request compare."""

    fields: int
    """How many fields were compared and are equal; 0 if a server refuses."""

    reasons: tuple[str, ...] = ()
    """Why some fields differ, as listed; without those that hold everywhere."""

    wrong: tuple[str, ...] = ()
    """What differs and is not listed."""

    refusal: str = ""
    """The error, if both servers gave the same."""


def compare(client: str, mine: Reply, theirs: Reply, listed: Sequence[Difference] = DIFFERENCES) -> Verdict:
    """Hold semel's reply to a request against bare vLLM's."""
    where = f"{client} {mine.api} {mine.request}"
    relevant = [one for one in listed if re.search(one.where, where)]
    if mine.error is not None or theirs.error is not None:
        return _compare_errors(mine.error, theirs.error, relevant)
    ours, bare = flat(mine.answer), flat(theirs.answer)
    equal, reasons, wrong = 0, dict[str, None](), []
    for path in sorted(ours.keys() | bare.keys()):
        if path in ours and path in bare and ours[path] == bare[path]:
            equal += 1
        elif (found := _reason(relevant, path, ours.get(path, ABSENT))) is None:
            wrong.append(f"{path}: {_brief(bare.get(path, ABSENT))} / {_brief(ours.get(path, ABSENT))}")
        elif found.where:
            reasons[found.reason] = None
    return Verdict(equal, tuple(reasons), tuple(wrong))


def read_replies(output: str) -> list[Reply]:
    """The lines of a driver; clients may print lines of their own, which are left out."""
    return [_decode(line) for line in output.splitlines() if line.startswith('{"api"')]


def _decode(line: str) -> Reply:
    return msgspec.json.decode(line, type=Reply)


def _compare_errors(mine: str | None, theirs: str | None, relevant: Sequence[Difference]) -> Verdict:
    if mine is not None and theirs is not None and _kind(mine) == _kind(theirs):
        return Verdict(0, refusal=mine)
    if mine is None and (found := next((one for one in relevant if one.path == ERROR), None)):
        return Verdict(0, (found.reason,))
    return Verdict(0, wrong=(f"error: {_brief(theirs)} / {_brief(mine)}",))


def _reason(relevant: Sequence[Difference], path: str, value: Any) -> Difference | None:
    """Why a field may differ, if semel's value is one of those that are listed."""
    return next((one for one in relevant if re.search(one.path, path) and (not one.ours or value in one.ours)), None)


def _kind(error: str) -> str:
    """The exception's class and status, without its words."""
    return error.partition(":")[0]


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:159]}…"
