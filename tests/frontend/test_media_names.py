"""Names for what was sent before: `uuid`s of clients, and the ids that answers return."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from semel.core import Digest, Tenant
from semel.errors import AmbiguousMedia
from semel.render.media import names as media_names
from semel.render.media.names import MediaNames
from tests.frontend.rig import Rig
from tests.frontend.test_file_references import (
    ACME,
    CHAT,
    FORMS,
    PNG,
    RENDER,
    UMBRA,
    UNKNOWN,
    chat,
    inline,
    objects,
    prompt_of,
    served,
    upload,
)
from tests.render.drawn import Drawing
from tests.store.stores import FaultyObjects
from tests.waiting import until

__all__ = ["objects", "served"]

UMBRA_S = {"authorization": f"Bearer {UMBRA}"}


def named(number: int, name: str = "screen") -> dict[str, Any]:
    """An image with its bytes and a name."""
    return {**inline(number), "uuid": name}


def alone(name: str = "screen") -> dict[str, Any]:
    """A name without bytes, as vLLM's clients send it."""
    return {"type": "image_url", "image_url": None, "uuid": name}


async def hold(served: Rig, prompt: Any) -> None:
    await until(lambda: all(served.worker.holding(item.digest) is not None for item in prompt.items))


async def error_of(served: Rig, body: dict[str, Any], **headers: str) -> tuple[int, str, str]:
    error = (reply := await served.client.post(CHAT, json=body, headers=headers)).json()["error"]
    return reply.status_code, error["code"], error["param"]


async def test_a_name_alone_is_what_was_sent_with_it(served: Rig, drawing: Drawing, objects: FaultyObjects) -> None:
    first = await prompt_of(served, chat(named(1)))
    await hold(served, first)
    objects.fault = "gone"  # nothing of it is needed
    assert await prompt_of(served, chat(alone())) == first
    assert await prompt_of(served, chat({"image_url": None, "uuid": "screen"})) == first
    assert drawing.processed == [1]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_name_whose_item_the_engine_loses_is_unknown_with_a_status_as_long_as_nobody_has_it(
    served: Rig, stream: bool
) -> None:
    """Also after the worker has taken the request, and before and after it answers are whole."""
    first = await prompt_of(served, chat(named(1)))
    await hold(served, first)
    body = chat(alone(), stream=stream)
    expected = await served.client.post(CHAT, json=body)
    assert expected.status_code == 200
    served.engine.lost.update(item.digest for item in first.items)
    assert await error_of(served, body) == (404, "unknown_media", "messages[0].content[0]")
    assert (await served.client.post(CHAT, json=chat(named(1)))).status_code == 200
    assert len((await served.client.post(CHAT, json=body)).content) == len(expected.content)


async def test_a_name_belongs_to_its_tenant_and_its_salt_S12(served: Rig) -> None:
    await hold(served, await prompt_of(served, chat(named(1))))
    seen = [await error_of(served, chat(alone(name)), **UMBRA_S) for name in ("screen", "never")]
    assert seen[0] == seen[1] == (404, "unknown_media", "messages[0].content[0]")
    assert (await error_of(served, chat(alone(), cache_salt="x")))[0] == 404
    body = chat(named(2))
    assert (await served.client.post(CHAT, json=body, headers=UMBRA_S)).status_code == 200
    await prompt_of(served, chat(alone()))  # still unambiguous


async def test_an_inspection_binds_nothing_E1(served: Rig) -> None:
    await served.ok(RENDER, chat(named(1)))
    assert (await error_of(served, chat(alone())))[0] == 404


@pytest.mark.parametrize("name", ["", "x" * 257, 7])
async def test_a_name_that_is_too_long_or_none_is_refused(served: Rig, name: Any) -> None:
    assert (await error_of(served, chat({**inline(1), "uuid": name})))[0] == 400


def test_the_names_of_one_tenant_do_not_push_out_those_of_another_S21() -> None:
    names, acme, umbra = MediaNames(max_entries=4), Tenant("acme"), Tenant("umbra")
    content = Digest(bytes([7]) * 32)
    names.bind(acme, "mine", content)
    names.add_content(acme, content, "image")
    for number in range(100):
        names.bind(umbra, str(number), Digest(bytes([number]) * 32))
    assert names.content(acme, "mine", "here") == content
    assert names.content(umbra, "0", "here") is None
    names.bind(acme, "mine", Digest(bytes([8]) * 32))
    with pytest.raises(AmbiguousMedia):
        names.content(acme, "mine", "here")
    assert media_names.MAX_NAME_CHARS == 256


async def test_an_answer_returns_the_ids_of_its_items_which_name_them_later(served: Rig, drawing: Drawing) -> None:
    uploaded = await upload(served, 2)
    answer = await served.ok(CHAT, chat(inline(1), FORMS["file"](uploaded), inline(1), return_media_ids=True))
    first, second, third = answer["media_ids"]
    assert (first, second) == (third, uploaded)
    assert first == await upload(served, 1)
    before = list(drawing.processed)
    prompt = await prompt_of(served, chat(FORMS["image_url"](first)))
    await hold(served, prompt)
    assert drawing.processed == before
    assert "media_ids" not in await served.ok(CHAT, chat(inline(1)))
    assert (await error_of(served, chat(FORMS["file"](first)), **UMBRA_S))[0] == 404
    assert (await error_of(served, chat(FORMS["file"](UNKNOWN))))[0] == 404


async def test_a_stream_returns_the_ids_with_its_usage(served: Rig) -> None:
    body = chat(inline(1), return_media_ids=True, stream=True, stream_options={"include_usage": True})
    reply = await served.post(CHAT, body)
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    assert [len(event.get("media_ids", ())) for event in events if event.get("usage")] == [1]
    assert "media_ids" in events[-1]


async def test_the_openai_package_shows_the_ids(served: Rig) -> None:
    transport: Any = served.client
    client = openai.AsyncOpenAI(api_key=ACME, base_url="http://frontend/v1", http_client=transport, max_retries=0)
    answer = await client.chat.completions.create(
        model="tiny", messages=chat(inline(1))["messages"], extra_body={"return_media_ids": True}
    )
    file = await client.files.create(file=("a.png", PNG + b"1"), purpose="user_data")
    assert (answer.model_extra or {})["media_ids"] == [file.id]


@pytest.mark.parametrize("salt", [None, "", "x" * 4_096, "\ud800"])
def test_a_name_takes_32_bytes_however_long_it_and_its_salt_are(salt: str | None) -> None:
    names, tenant, content = MediaNames(), Tenant("acme", salt), Digest(bytes([7]) * 32)
    names.bind(tenant, "n" * 256, content)
    assert names.content(tenant, "n" * 256, "") == content
    assert [len(key) for key in names._memory(tenant).names] == [32]
    for other in (None, "", "n", "x" * 4_095):
        assert other == salt or names.content(Tenant("acme", other), "n" * 256, "") is None
