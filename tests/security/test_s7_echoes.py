"""S7: what a client has written comes back as an excerpt, whatever its size; where workers are is told to nobody.

The wrong implementation put all of it into the message: 8 MB in, 8.4 MB out, and 256 MB of one character became 700 MB.
"""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError, field_validator

from semel.errors import InvalidRequest
from semel.frontend.api.shared.faults import fault_of
from semel.wire.events import Reset
from tests.frontend.rig import Rig
from tests.waiting import until

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
LONG = "\U000e0001" * 100_000
MOST = 1_000


@pytest.mark.parametrize(
    "fields",
    [
        {"model": LONG},
        {"response_format": {"type": LONG}},
        {"tool_choice": LONG},
        {"tools": [{"type": LONG}]},
        {"structured_outputs": {LONG: 1}},
        {LONG: 1, "max_tokens": LONG},
        {"bad_words": [LONG, 5]},
        {"messages": [{"role": LONG, "content": "hello"}]},
        {"messages": [{"role": "user", "content": [{"type": LONG}]}]},
    ],
)
async def test_an_error_shows_an_excerpt_of_what_a_client_has_written_S7(app: Rig, fields: dict[str, Any]) -> None:
    response = await app.post(CHAT, {"messages": MESSAGES, **fields})
    assert response.status_code in (400, 404), response.text[:500]
    assert len(response.json()["error"]["message"]) < MOST
    assert len(response.content) < 8 * MOST


def test_the_words_of_a_validator_are_cut_S7() -> None:
    class Body(BaseModel):
        name: str

        @field_validator("name")
        @classmethod
        def refuse(cls, value: str) -> str:
            raise ValueError(f"{value} is no name")

    with pytest.raises(ValidationError) as caught:
        TypeAdapter(Body).validate_python({"name": LONG})
    fault = fault_of(caught.value)
    assert isinstance(fault, InvalidRequest)
    assert len(str(fault)) < MOST
    assert len(str(caught.value.errors()[0]["msg"])) > len(LONG), "the control: what it says by itself"


async def test_no_probe_and_no_refusal_says_where_a_worker_is_S7(app: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Both once told the address of the socket, and in whose words the connection had broken."""
    name = app.worker.name
    assert name.startswith("ipc://")
    app.worker._lose(Reset("gone", f"the connection to {name} broke: it was closed"))
    app.service.suspend(app.worker.reason)
    await until(lambda: bool(app.service.reason))
    ready = await app.client.get("/ready")
    assert (ready.status_code, ready.json()["reason"]) == (503, "no worker is connected")
    refused = await app.post(CHAT, {"messages": MESSAGES})
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        503,
        "no worker is connected; try again in a moment",
    )
    assert f"the connection to {name} broke: it was closed" in caplog.text
