"""What the engine refuses of a request: the client is told which field is at fault."""

from __future__ import annotations

from typing import Any

import pytest

from semel.errors import InvalidRequest, error_for
from tests.frontend.rig import Rig

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_that_begins_with_a_field_of_the_request_names_it(
    app: Rig, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """The wrong implementation answered null; so does this one for a field that the request does not have."""

    async def submit(*_: Any, **__: Any) -> Any:
        raise InvalidRequest("temperature must be in [0, 2], got 99.0.")

    monkeypatch.setattr(app.engine, "submit", submit)
    named = await app.post("/v1/chat/completions", {**CHAT, "temperature": 99, "stream": stream})
    assert named.status_code == 400
    assert named.json()["error"]["param"] == "temperature"
    assert named.json()["error"]["message"] == "temperature must be in [0, 2], got 99.0."
    other = await app.post("/v1/chat/completions", {**CHAT, "top_p": 0.5, "stream": stream})
    assert (other.status_code, other.json()["error"]["param"]) == (400, None)


def test_only_a_field_that_was_sent_is_taken_for_one() -> None:
    fields = {"temperature", "top_p"}
    for message, param in [("top_p: must be less", "top_p"), ("the top_p", None), ("", None), ("temperatures", None)]:
        assert getattr(error_for("invalid_request", message, fields), "param", None) == param
    assert not hasattr(error_for("internal_error", "top_p is odd", fields), "param")
