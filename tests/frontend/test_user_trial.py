"""No request of a client is worse off than with bare vLLM, but those that docs/api/routes.md lists with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from semel.frontend.http.ignored_fields import IGNORED_FIELDS_HEADER
from tests.frontend.rig import Rig
from tests.render.drawn import image_part
from tools.user_trial import CHAT, OK, ROWS, Row, body_of

API = (Path(__file__).parents[2] / "docs" / "api" / "routes.md").read_text()
IMAGE = image_part(3)["image_url"]["url"]
FORBIDDEN = ("Extra inputs", "Input should", "Field required")


async def status_of(app: Rig, row: Row) -> int:
    reply = await app.post(row.route, json.loads(json.dumps(body_of(row, IMAGE, "tiny"))))
    assert not [words for words in FORBIDDEN if words in reply.text]
    return reply.status_code


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.client)
async def test_a_request_is_answered_if_vllm_answers_it_or_the_reason_is_documented(app: Rig, row: Row) -> None:
    status = await status_of(app, row)
    if row.worse:
        assert row.vllm == OK
        assert status in (400, 404)
        assert row.worse in API
    elif row.vllm == OK:
        assert status == OK
    assert status < 500


async def test_what_gateways_add_is_ignored_and_said(app: Rig) -> None:
    rows = [row for row in ROWS if row.client.startswith(("Open WebUI: f", "OpenRouter", "DashScope", "Ollama"))]
    assert len(rows) == 5
    for row in rows:
        reply = await app.post(CHAT, dict(row.body(IMAGE)))
        assert IGNORED_FIELDS_HEADER in reply.headers


async def test_control_with_unknown_fields_refused_these_rows_are_worse_than_vllm(app: Rig) -> None:
    app.service.unknown_fields_mode = "refuse"
    worse = [row.client for row in ROWS if row.vllm == OK and not row.worse and await status_of(app, row) != OK]
    assert {"Open WebUI: fields of its own", "Ollama: options", "openai: verbosity"} <= set(worse)
