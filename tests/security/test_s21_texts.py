"""S21: texts are charged while they become tokens, which takes 200 times their memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from semel.frontend.budget import Budget
from semel.frontend.limits import BudgetLimits
from semel.frontend.routes.call import Call
from semel.render import Tokenizer
from semel.render.tokens.tokenizer import unlimited_room
from tests.frontend.rig import Rig

TEXT = "a b " * 3_000
CHAR_BYTES = 200
ROUTES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
    "chat with a placeholder": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": TEXT + "<|image_pad|>"}]},
    ),
    "completion": ("/v1/completions", {"prompt": TEXT}),
    "rendered chat": ("/v1/chat/completions/render", {"messages": [{"role": "user", "content": TEXT}]}),
    "rendered completion": ("/v1/completions/render", {"prompt": TEXT}),
    "tokenized text": ("/tokenize", {"prompt": TEXT}),
    "tokenized chat": ("/tokenize", {"messages": [{"role": "user", "content": TEXT}]}),
}


async def charged_while_encoding(app: Rig, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]) -> int:
    """The most bytes in flight while the tokenizer runs."""
    encode, most = Tokenizer._encode, [0]

    def encoded(tokenizer: Tokenizer, texts: list[str], special: bool) -> list[list[int]]:
        most[0] = max(most[0], app.service.budget.in_flight)
        return encode(tokenizer, texts, special)

    monkeypatch.setattr(Tokenizer, "_encode", encoded)
    await app.post(path, body)
    assert app.service.budget.in_flight == 0
    return most[0]


@pytest.mark.parametrize("route", ROUTES)
async def test_a_text_is_charged_before_tokens_are_made_of_it(
    app: Rig, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    assert await charged_while_encoding(app, monkeypatch, *ROUTES[route]) >= CHAR_BYTES * len(TEXT)


@pytest.mark.parametrize("route", ROUTES)
async def test_where_there_is_no_room_no_tokens_are_made(app: Rig, monkeypatch: pytest.MonkeyPatch, route: str) -> None:
    path, body = ROUTES[route]
    app.service.budget = Budget(BudgetLimits(max_request_bytes=1_000_000, max_bytes=CHAR_BYTES * 20_000))
    monkeypatch.setattr(Tokenizer, "_encode", None)
    with app.service.budget.open() as first, app.service.budget.open() as second:
        first.take(1_000_000)
        second.take(1_000_000)
        answer = await app.post(path, body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_bytes")
    assert answer.headers["retry-after"]


async def test_mutant_a_route_without_room_charges_the_body_only(app: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Call, "text_room", lambda _, chars: unlimited_room(chars))
    assert await charged_while_encoding(app, monkeypatch, *ROUTES["chat"]) < 10 * len(TEXT)
