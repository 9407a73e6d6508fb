"""What clients made of two servers' answers is compared whole: whatever is not listed is noticed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from tests.clients.comparison import ABSENT, ERROR, REQUESTS, Difference, Reply, Verdict, compare, read_replies
from tests.clients.environments import CLIENTS, Client
from tests.clients.page import Row, lines_of, replace_rows, wrong_lines
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


def test_what_is_listed_may_differ_and_the_rest_is_counted() -> None:
    other = changed("tool_calls.0.id", "d") | {"id": "b", "created": 2}
    verdict = compare("openai", reply(other), reply(ANSWER))
    assert verdict == Verdict(fields=11)
    assert compare("openai", reply(ANSWER), reply(ANSWER)).fields == 14
    assert compare("openai", reply(changed("created", "")), reply(ANSWER), listed=()).wrong == ("created: 1 / ''",)


def test_a_reason_for_one_client_holds_for_no_other() -> None:
    listed = (Difference("^content$", "it shouts", where="^openai chat"),)
    mine, theirs = reply(changed("content", "HELLO")), reply(ANSWER)
    assert compare("openai", mine, theirs, listed) == Verdict(13, ("it shouts",))
    assert compare("litellm", mine, theirs, listed).wrong == ("content: 'hello' / 'HELLO'",)


def test_a_reason_holds_for_the_values_that_are_listed() -> None:
    listed = (Difference("^content$", "it is silent", ours=(None, ABSENT)),)
    for value in (None, ...):
        assert not compare("openai", reply(changed("content", value)), reply(ANSWER), listed).wrong
    assert compare("openai", reply(changed("content", "")), reply(ANSWER), listed).wrong == ("content: 'hello' / ''",)


def test_what_vllm_refuses_may_be_answered_where_that_is_listed() -> None:
    listed = (Difference(ERROR, "vLLM has no such tools", where="^openai chat text$"),)
    answered, refused = reply(ANSWER), reply(error="BadRequestError 400: no")
    assert compare("openai", answered, refused, listed) == Verdict(0, ("vLLM has no such tools",))
    assert compare("litellm", answered, refused, listed).wrong
    assert compare("openai", refused, answered, listed).wrong
    assert compare("openai", reply(changed("content", "")), answered, listed).wrong
    row = Row("openai", "1", "chat", {"text": compare("openai", answered, refused, listed)})
    assert lines_of([row])[2] == "| `openai` | 1 | chat | vLLM refuses (1) |  |  |  |  |"


@pytest.mark.parametrize(
    ("mine", "theirs", "is_right"),
    [
        (reply(error="BadRequestError 400: no"), reply(error="BadRequestError 400: never"), True),
        (reply(error="BadRequestError 400: no"), reply(error="NotFoundError 404: no"), False),
        (reply(error="BadRequestError 400: no"), reply(ANSWER), False),
        (reply(ANSWER), reply(error="BadRequestError 400: no"), False),
    ],
)
def test_refusals_are_alike_if_the_exception_is(mine: Reply, theirs: Reply, is_right: bool) -> None:
    verdict = compare("openai", mine, theirs)
    assert (not verdict.wrong, bool(verdict.refusal)) == (is_right, is_right)


def test_a_driver_s_lines_are_read_among_others() -> None:
    code = (
        "from driver import tell, data_url\n"
        "print('a client may print')\n"
        "tell('chat', 'text', lambda: {'a': [1, b'x'], 'b': object})\n"
        "tell('chat', 'image', lambda: [][0])\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=DRIVERS, capture_output=True, text=True, check=True, timeout=60
    )
    first, second = read_replies(found.stdout)
    assert first.answer["a"] == [1, "eA=="]
    assert (second.request, second.error) == ("image", "IndexError : list index out of range")


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


def test_what_only_semel_has_must_hold() -> None:
    files = Reply("files", "image", {"listed": True, "content": False})
    (row,) = rows_of(OPENAI, [files], [])
    assert row.verdicts["image"] == Verdict(1, wrong=("content",))
    (row,) = rows_of(OPENAI, [Reply("files", "image", error="NotFoundError 404: no")], [])
    assert row.verdicts["image"].wrong


def test_the_page_keeps_what_is_around_the_table() -> None:
    page = "before\n<!-- begin table -->\nold\n<!-- end table -->\nbehind\n"
    assert replace_rows(page, ["new"]) == page.replace("old", "new")
