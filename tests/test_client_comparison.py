"""What clients made of two servers' answers is compared whole: whatever is not listed is noticed."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from tools.client_comparison import REQUESTS, Reply, Verdict, compare
from tools.client_environments import CLIENTS, Client
from tools.client_page import Row, lines_of, wrong_lines
from tools.clients import DRIVERS, rows_of

ANSWER: dict[str, Any] = {
    "id": "a",
    "created": 1,
    "content": "hello",
    "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
    "usage": {"prompt_tokens": 3, "details": None},
    "nothing": [],
}
OPENAI = Client("openai", "1", "openai", semel_only=("files",))


def reply(answer: Any = None, error: str | None = None, api: str = "chat") -> Reply:
    return Reply(api, "text", answer, error)


def changed(path: str, value: Any) -> dict[str, Any]:
    """The answer with another value; without the field if the value is `...`."""
    made: Any = deepcopy(ANSWER)
    *names, last = path.split(".")
    place: Any = made
    for name in names:
        place = place[int(name) if name.isdigit() else name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return dict(made)


PATHS = ("content", "tool_calls.0.function.name", "usage.prompt_tokens", "usage.details", "nothing")


def is_noticed(comparing: Callable[[str, Reply, Reply], Verdict], path: str, value: Any) -> bool:
    pair = reply(changed(path, value)), reply(ANSWER)
    return all(comparing("openai", mine, theirs).wrong for mine, theirs in (pair, pair[::-1]))


@pytest.mark.parametrize("value", ["other", ..., {"new": 1}])
@pytest.mark.parametrize("path", PATHS)
def test_a_field_that_differs_is_noticed(path: str, value: Any) -> None:
    assert is_noticed(compare, path, value)


def test_mutant_a_comparison_of_texts_alone_misses_most() -> None:
    def texts(_client: str, mine: Reply, theirs: Reply) -> Verdict:
        return Verdict(1, wrong=() if mine.answer.get("content") == theirs.answer.get("content") else ("content",))

    assert [is_noticed(texts, path, "other") for path in PATHS] == [True, False, False, False, False]


def test_every_client_has_a_driver_that_is_python() -> None:
    for client in CLIENTS:
        path = DRIVERS / f"ask_{client.driver}.py"
        compile(path.read_text(), str(path), "exec")


def test_the_table_has_a_row_for_each_api_and_points_to_reasons() -> None:
    files = Reply("files", "image", {"listed": True, "content": True})
    rows = rows_of(OPENAI, [reply(ANSWER), files], [reply(changed("id", "b"))])
    assert [row.api for row in rows] == ["chat", "files, semel only"]
    rows.append(Row("other", "2", "chat", {"text": Verdict(5, ("because",)), "tools": Verdict(0, refusal="no")}))
    rows.append(Row("third", "3", "chat", {"text": Verdict(5, (), ("content: 1 / 2",))}))
    rows.append(Row("gone", "4", "", note="could not be installed"))
    lines = lines_of(rows)
    assert lines[2:] == [
        "| `openai` | 1 | chat | 13 equal |  |  |  |  |",
        "| `openai` | 1 | files, semel only |  | 2 equal |  |  |  |",
        "| `other` | 2 | chat | 5 equal (1) |  |  | both refuse |  |",
        "| `third` | 3 | chat | **1 differ** |  |  |  |  |",
        "| `gone` | 4 |  | could not be installed | | | | |",
        "",
        "1. because",
    ]
    assert {line.count("|") for line in lines[:7]} == {len(REQUESTS) + 4}
    assert wrong_lines(rows) == ["other chat tools: both refuse: no", "third chat text: content: 1 / 2"]
