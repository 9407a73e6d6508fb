"""Files in chats: named by id, read once, found by their tenant only, and with the store gone."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from semel.aio import concurrently
from semel.cache import NoCache
from semel.core import Digest, Feature, Keyring, Media, Tenant
from semel.frontend.budget import Budget
from semel.frontend.limits import BudgetLimits
from semel.render import file_sources
from semel.render.file_sources import FileSources
from semel.render.media.names import MediaNames
from semel.store.names import StoredFile, public_id
from tests.frontend.rig import Rig, rig
from tests.render.drawn import FEATURE_BYTES, Drawing
from tests.store.stores import Clock, FaultyObjects, in_memory, store_over
from tests.waiting import until

ACME, UMBRA = "acme-0123456789abcdef", "umbra-0123456789abcdef"
CHAT, RENDER, FILES = "/v1/chat/completions", "/v1/chat/completions/render", "/v1/files"
PNG = b"\x89PNG\r\n\x1a\n"
UNKNOWN = f"file-{'0' * 64}"

FORMS: Mapping[str, Any] = {
    "file": lambda file_id: {"type": "file", "file": {"file_id": file_id}},
    "image_url": lambda file_id: {"type": "image_url", "image_url": {"file_id": file_id}},
    "image_url with a null URL": lambda file_id: {"type": "image_url", "image_url": {"file_id": file_id, "url": None}},
    "file without a type": lambda file_id: {"file": {"file_id": file_id}},
}


@pytest.fixture
def objects() -> FaultyObjects:
    return FaultyObjects(in_memory())


@pytest.fixture
async def served(tmp_path: Path, drawing: Drawing, objects: FaultyObjects) -> AsyncIterator[Rig]:
    """Its worker holds what it has got, and its frontend caches nothing."""

    async def process(media: Media, options: Mapping[str, object], **_: object) -> Feature:
        return await drawing.process(Media(media.modality, media.data.removeprefix(PNG)), options)

    store = await store_over(objects, Clock(), key=drawing.pipeline.key)
    pipeline = replace(drawing.pipeline, process=process, cache=NoCache(), files=FileSources(store))
    keys = Keyring([("acme", ACME), ("umbra", UMBRA)])
    async with rig(tmp_path, pipeline, engine_bytes=64 * FEATURE_BYTES, keys=keys) as made:
        made.service.media_store = store
        made.client.headers["authorization"] = f"Bearer {ACME}"
        yield made


async def upload(served: Rig, number: int = 1, data: bytes | None = None) -> str:
    files = {"file": ("a.png", PNG + str(number).encode() if data is None else data)}
    reply = await served.client.post(FILES, files=files, data={"purpose": "vision"})
    assert reply.status_code == 200, reply.text
    file_id: str = reply.json()["id"]
    return file_id


def chat(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}], **fields}


def inline(number: int) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(PNG + str(number).encode()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


async def prompt_of(served: Rig, body: dict[str, Any]) -> Any:
    """What the engine gets of a chat."""
    await served.ok(CHAT, body)
    assert served.engine.last is not None
    return served.engine.last.prompt


AGENTS: Mapping[str, tuple[str, Any]] = {
    "an image of Responses": ("/v1/responses", lambda file_id: {"type": "input_image", "file_id": file_id}),
    "a file of Responses": ("/v1/responses", lambda file_id: {"type": "input_file", "file_id": file_id}),
    "an image of Messages": (
        "/v1/messages",
        lambda file_id: {"type": "image", "source": {"type": "file", "file_id": file_id}},
    ),
}


def agents_request(path: str, part: dict[str, Any]) -> dict[str, Any]:
    if path == "/v1/responses":
        return {"input": [{"role": "user", "content": [part, {"type": "input_text", "text": "?"}]}]}
    return {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}], "max_tokens": 8}


@pytest.mark.parametrize("form", AGENTS)
async def test_a_file_in_the_apis_of_agents_is_the_one_of_a_chat(served: Rig, drawing: Drawing, form: str) -> None:
    path, part = AGENTS[form]
    file_id = await upload(served)
    expected = await prompt_of(served, chat(inline(1)))
    await served.ok(path, agents_request(path, part(file_id)))
    assert served.engine.last is not None
    assert served.engine.last.prompt.items == expected.items
    assert drawing.processed == [1]
    reply = await served.client.post(path, json=agents_request(path, part(UNKNOWN)))
    assert reply.status_code == 404
    assert "content[0]: there is no file" in reply.text
    assert reply.json()["error"]["code"] == "unknown_media"


@pytest.mark.parametrize("form", FORMS)
async def test_a_file_is_answered_as_the_same_image_inline(served: Rig, drawing: Drawing, form: str) -> None:
    file_id = await upload(served)
    assert await prompt_of(served, chat(FORMS[form](file_id))) == await prompt_of(served, chat(inline(1)))
    rendered = [await served.ok(RENDER, chat(part)) for part in (FORMS[form](file_id), inline(1))]
    assert rendered[0]["features"] == rendered[1]["features"]
    assert rendered[0]["token_ids"] == rendered[1]["token_ids"]
    assert drawing.processed[0] == 1


async def test_a_file_that_a_worker_has_is_used_without_reading_it_also_with_the_store_gone(
    served: Rig, objects: FaultyObjects, drawing: Drawing
) -> None:
    file_id = await upload(served)
    part = FORMS["file"](file_id)
    first = await prompt_of(served, chat(part))
    await until(lambda: all(served.worker.holding(item.digest) is not None for item in first.items))
    objects.calls.clear()
    for fault in ("", "gone"):
        objects.fault = fault
        assert await prompt_of(served, chat(part)) == first
    assert objects.calls == []
    assert drawing.processed == [1]
    assert served.service.budget.in_flight == 0


async def test_mutant_without_remembered_digests_every_use_reads_the_file(
    served: Rig, objects: FaultyObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MediaNames, "remember_digest", lambda *_: None)
    file_id = await upload(served)
    for _ in range(2):
        await prompt_of(served, chat(FORMS["file"](file_id)))
    assert objects.calls.count("get") == 2


async def test_a_file_that_is_named_twice_is_read_once(served: Rig, objects: FaultyObjects, drawing: Drawing) -> None:
    part = FORMS["file"](await upload(served))
    await prompt_of(served, chat(part, part, inline(1)))
    assert objects.calls.count("get") == 1
    assert drawing.processed == [1]


WRONG: Mapping[str, Any] = {
    "no object": {"type": "file", "file": "x"},
    "no id": {"type": "file", "file": {}},
    "an id that is none": {"type": "file", "file": {"file_id": 7}},
    "an id and a URL": {"type": "image_url", "image_url": {"file_id": UNKNOWN, "url": "https://x/"}},
    "a document": {"type": "file", "file": {"file_data": "data:application/pdf;base64,QQ=="}},
    "base64 alone": {"type": "file", "file": {"file_data": "QQ=="}},
    "bytes and an id": {"type": "file", "file": {"file_data": "data:image/png;base64,QQ==", "file_id": UNKNOWN}},
    "no base64": {"type": "file", "file": {"file_data": "data:image/png;base64,=="}},
}


@pytest.mark.parametrize("case", WRONG)
async def test_a_part_that_names_no_file_is_refused_with_its_place(served: Rig, case: str) -> None:
    reply = await served.post(CHAT, chat(WRONG[case]))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages[0].content[0]")


@pytest.mark.parametrize("filler", ["", "\n" * 300_000], ids=["short", "long"])
async def test_an_image_that_is_sent_as_a_file_is_the_image(served: Rig, filler: str) -> None:
    """OpenAI's inline form. Long ones are no text: they never become a string."""
    url = "data:image/png;base64," + base64.b64encode(PNG + b"1" + filler.encode()).decode()
    image = {"type": "image_url", "image_url": {"url": url}}
    file = {"type": "file", "file": {"filename": "screen.png", "file_data": url}}
    served.service.body = replace(served.service.body, max_text_bytes=4_096)
    assert await prompt_of(served, chat(file)) == (expected := await prompt_of(served, chat(image)))
    await served.ok("/v1/responses", agents_request("/v1/responses", {"type": "input_file", "file_data": url}))
    assert served.engine.last is not None
    assert served.engine.last.prompt.items == expected.items


async def test_a_file_that_is_no_image_is_refused_where_one_is_needed(served: Rig) -> None:
    wave, text = await upload(served, data=b"RIFF\0\0\0\0WAVEfmt "), await upload(served, data=b"hello")
    for file_id, form, said in (
        (wave, "image_url", "audio"),
        (text, "file", "neither"),
        (text, "image_url", "neither"),
    ):
        status, message = await served.refused(CHAT, chat(FORMS[form](file_id)))
        assert (status, said in message) == (400, True)


class Counted:
    """Files that look for what they do not remember in a store of even numbers."""

    def __init__(self, remembered: range) -> None:
        self.looked: list[Digest] = []
        self.names = MediaNames()
        for number in remembered:
            self.names.add_content(Tenant("acme"), numbered(number), "image")

    async def locate(self, tenant: str, digest: Digest) -> StoredFile | None:
        assert tenant == "acme"
        self.looked.append(digest)
        await asyncio.sleep(0)
        return SimpleNamespace(modality="audio") if digest[-1] % 2 == 0 else None  # type: ignore[return-value]

    async def found(self, numbers: range, tenant: str = "acme") -> dict[int, str | None]:
        files = FileSources(self, self.names)  # type: ignore[arg-type]
        parts = [FORMS["file"](public_id(numbered(number))) for number in numbers]
        located = await files.locate(chat(*parts)["messages"], Tenant(tenant))
        return {digest[-1]: modality for digest, modality in located.values()}


def numbered(number: int) -> Digest:
    return Digest(bytes([number]) * Digest.size)


async def check_only_what_is_not_remembered_is_looked_for() -> None:
    counted = Counted(range(40))
    assert await counted.found(range(40)) == dict.fromkeys(range(40), "image")
    assert counted.looked == []
    assert await counted.found(range(38, 43)) == {38: "image", 39: "image", 40: "audio", 42: "audio"}
    assert counted.looked == [numbered(40), numbered(41), numbered(42)]
    many = Counted(range(0, 200, 2))
    assert set(await many.found(range(200))) == set(range(0, 200, 2)), "one is unknown, and ends the request"
    assert many.looked == [numbered(1)]


async def test_what_was_sent_before_is_not_looked_for_in_the_store() -> None:
    await check_only_what_is_not_remembered_is_looked_for()


async def test_a_mutant_that_remembers_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MediaNames, "modality", lambda *_: None)
    with pytest.raises(AssertionError):
        await check_only_what_is_not_remembered_is_looked_for()


async def test_what_was_sent_before_is_located_without_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    async def counting(values: Any, work: Any, **options: Any) -> None:
        values = list(values)
        made.extend(values)
        await concurrently(values, work, **options)

    monkeypatch.setattr(file_sources, "concurrently", counting)
    await Counted(range(40)).found(range(40))
    assert made == []
    await Counted(range(40)).found(range(44))  # the control
    assert len(made) == 3  # 40 is there, 41 is not


async def test_files_count_as_items_and_their_bytes_as_the_request_s_S18(
    served: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = FORMS["file"](await upload(served))
    status, message = await served.refused(CHAT, chat(*[part] * 9))
    assert (status, "--limit-mm-per-prompt" in message) == (400, True)
    large = FORMS["file"](await upload(served, data=PNG + b"0" * 200_000 + b"1"))
    served.service.budget = Budget(replace(BudgetLimits(), max_request_bytes=100_000, max_bytes=500_000))
    assert (await served.refused(CHAT, chat(large)))[0] == 413
    monkeypatch.setattr(file_sources, "_MAX_FILES", 1)
    status, message = await served.refused(CHAT, chat(large, FORMS["file"](UNKNOWN)))
    assert (status, "2 files" in message) == (400, True)
    assert served.service.budget.in_flight == 0
