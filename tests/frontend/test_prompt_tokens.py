"""Tokens of prompts are counted when a worker has taken them; those of requests that are refused are not."""

from __future__ import annotations

import pytest

from semel.errors import NotReady
from semel.fleet.fleet import Fleet
from tests.frontend.rig import MAX_TOKENS, Rig

PATH = "/v1/completions"


def counted(app: Rig) -> int:
    return sum(tokens.prompt for tokens in app.service.serving().fleet.tokens.values())


async def test_only_prompts_that_a_worker_has_taken_are_counted(app: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    status, _ = await app.refused(PATH, {"prompt": "hello " * MAX_TOKENS})
    assert (status, counted(app)) == (400, 0)
    with monkeypatch.context() as patch:

        async def refuse(*_: object, **__: object) -> None:
            raise NotReady("no worker takes it")

        patch.setattr(Fleet, "submit", refuse)
        status, _ = await app.refused(PATH, {"prompt": "hello"})
    assert (status, counted(app)) == (503, 0)
    tokens = (await app.ok("/tokenize", {"prompt": "hello"}))["tokens"]
    await app.ok(PATH, {"prompt": "hello"})
    assert counted(app) == len(tokens)
