"""A model that has several names."""

from __future__ import annotations

from dataclasses import replace

from semel.frontend.service import ServedModel
from tests.frontend.rig import Rig

PROMPT = {"prompt": "hello", "max_tokens": 1}


def rename(app: Rig, *aliases: str) -> None:
    serving = app.service.serving()
    app.service.begin(ServedModel(serving.fleet, replace(serving.contract, aliases=aliases), serving.pipeline))


async def test_all_names_are_listed_and_answered_and_the_first_is_in_responses(app: Rig) -> None:
    rename(app, "small", "org/small")
    listed = (await app.client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["tiny", "small", "org/small"]
    for name in ("tiny", "small", "org/small"):
        answer = await app.ok("/v1/completions", {**PROMPT, "model": name})
        assert answer["model"] == "tiny"
    status, message = await app.refused("/v1/completions", {**PROMPT, "model": "other"})
    assert (status, message) == (404, "model: 'other' is not served here; 'tiny', 'small', 'org/small' are")
