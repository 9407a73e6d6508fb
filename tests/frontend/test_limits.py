"""What a request may have is checked before anything is made of it."""

from __future__ import annotations

import pytest

from tests.frontend.rig import MAX_IMAGES, Rig
from tests.render.drawn import Drawing, chat

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("path", [CHAT, f"{CHAT}/render"])
async def test_too_many_items_are_refused_before_one_of_them_is_processed_S18(
    app: Rig, drawing: Drawing, path: str
) -> None:
    response = await app.post(path, {"messages": list(chat(*range(MAX_IMAGES + 1)).messages)})
    assert response.status_code == 400
    assert "--limit-mm-per-prompt" in response.json()["error"]["message"]
    assert drawing.processed == []


@pytest.mark.parametrize("field", [{"cache_salt": "x" * 1_025}, {"stop": "x" * 1_025}, {"stop": ["x" * 1_025]}])
async def test_what_travels_between_the_processes_has_bounds_S18(app: Rig, field: dict[str, object]) -> None:
    response = await app.post(CHAT, {"messages": list(chat().messages), **field})
    assert response.status_code == 400
    (name,) = field
    assert response.json()["error"]["message"].startswith(name)
