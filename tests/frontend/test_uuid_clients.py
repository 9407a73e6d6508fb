"""Clients that strip media and send a `uuid` instead: aiperf, and what is written for NVIDIA Dynamo.

Their requests are in `fixtures`, each with what it was written from: the code that makes them, and its tests. The
images are drawn, and nothing else is changed.
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx
import pytest

from semel.render.chat.messages import Conversation
from semel.render.media import part_source
from semel.render.media.names import MediaNames
from semel.render.media.source import MediaName
from tests.frontend.rig import Rig
from tests.frontend.test_file_references import CHAT, objects, served
from tests.render.drawn import Drawing

__all__ = ["objects", "served"]

FIXTURES = Path(__file__).parent / "fixtures"
CLIENTS = ("aiperf", "dynamo")
Body = dict[str, Any]


def requests_of(client: str) -> list[Body]:
    recorded: list[Body] = json.loads((FIXTURES / f"{client}_image_uuids.json").read_text())["requests"]
    return recorded


def parts_of(body: Body) -> list[Body]:
    return [part for message in body["messages"] for part in message["content"] if part["type"] == "image_url"]


def uuid_of(part: Body) -> str:
    uuid: str = part["uuid"] if "uuid" in part else part["image_url"]["uuid"]
    return uuid


def url_of(part: Body) -> str:
    return (part["image_url"] or {}).get("url") or ""


def urls_of(client: str) -> dict[str, str]:
    """What each uuid stands for."""
    parts = [part for body in requests_of(client) for part in parts_of(body)]
    return {uuid_of(part): url_of(part) for part in parts if url_of(part)}


def whole(client: str, body: Body) -> Body:
    """The request with all of its images, as if the client stripped nothing."""
    made, urls = deepcopy(body), urls_of(client)
    for part in parts_of(made):
        part["image_url"] = {"url": urls[uuid_of(part)]}
    return made


async def items_of(served: Rig, body: Body) -> Any:
    reply = await served.client.post(CHAT, json=body)
    assert reply.status_code == 200, reply.text
    assert served.engine.last is not None
    return served.engine.last.prompt.items


def forget(served: Rig) -> None:
    """As if the frontend had started again."""
    names = served.service.serving().pipeline.files.names
    names._memories.clear()


def unknown_part(reply: httpx.Response, body: Body) -> Body:
    """The part that a refusal blames."""
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (404, "unknown_media"), reply.text
    message, part = (int(piece.partition("]")[0]) for piece in error["param"].split("[")[1:])
    blamed: Body = body["messages"][message]["content"][part]
    return blamed


@pytest.mark.parametrize("client", CLIENTS)
async def test_stripped_requests_are_answered_as_whole_ones(served: Rig, drawing: Drawing, client: str) -> None:
    """Each image is sent and preprocessed once."""
    for body in requests_of(client):
        assert await items_of(served, body) == await items_of(served, whole(client, body))
    assert sorted(drawing.processed) == [1, 2, 3]


@pytest.mark.parametrize("client", CLIENTS)
async def test_after_a_restart_the_client_learns_what_to_send_again(served: Rig, client: str) -> None:
    """Repair: each refusal names one part. With the bytes of these parts the request is answered, and then without."""
    *filling, stripped = requests_of(client)
    for body in filling:
        await items_of(served, body)
    expected = await items_of(served, stripped)
    forget(served)
    repaired, urls, repairs = deepcopy(stripped), urls_of(client), 0
    while (reply := await served.client.post(CHAT, json=repaired)).status_code == 404:
        part = unknown_part(reply, repaired)
        assert not url_of(part)
        part["image_url"] = {"url": urls[uuid_of(part)]}
        repairs += 1
    assert repairs == sum(not url_of(part) for part in parts_of(stripped))
    assert reply.status_code == 200
    assert await items_of(served, stripped) == expected


async def test_mutant_that_takes_an_empty_url_for_one_refuses_aiperf(
    served: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_source, "_is_stripped", lambda value: value is None)
    first, second, *_ = requests_of("aiperf")
    await items_of(served, first)
    assert (await served.client.post(CHAT, json=second)).status_code == 400


async def test_mutant_that_forgets_its_names_answers_no_stripped_request(
    served: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MediaNames, "bind", lambda *_: None)
    first, second, *_ = requests_of("dynamo")
    await items_of(served, first)
    assert (await served.client.post(CHAT, json=second)).status_code == 404


STRIPPED: dict[str, Any] = {
    "null": None,
    "an empty URL": {"url": ""},
    "a null URL": {"url": None},
    "an empty object": {},
    "an empty string": "",
}


@pytest.mark.parametrize("value", STRIPPED.values(), ids=STRIPPED)
@pytest.mark.parametrize("field", ["image_url", "audio_url", "video_url", "input_audio"])
def test_every_way_to_leave_media_out_names_it(field: str, value: Any) -> None:
    part = {"type": field, field: value, "uuid": "x"}
    (attachment,) = Conversation.parse([{"role": "user", "content": [part]}]).attachments
    source = attachment.source
    modality = field.removeprefix("input_").removesuffix("_url")
    assert source == MediaName(modality, "x", "messages[0].content[0]")  # type: ignore[arg-type]
