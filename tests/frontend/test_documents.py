"""PDFs in chats, Responses and Messages: their pages are images, known again without opening the document."""

from __future__ import annotations

import base64
import threading
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from semel.cache import NoCache
from semel.core import Feature, Identity, Keyring, Media, Tenant
from semel.errors import MediaUndecodable
from semel.lab.testing.pdf import page_of, pdf
from semel.media import DocumentLimits, count_pages
from semel.media.fetch.url import Url
from semel.render import ChatRenderer, ChatRequest
from semel.render.chat.messages import Conversation
from semel.render.documents import Documents, expand_documents
from semel.render.file_sources import FileSources
from semel.render.media.names import MediaNames
from tests.frontend.rig import MAX_IMAGES, Rig, rig
from tests.render.drawn import FEATURE_BYTES, Drawing, drawn, image_part
from tests.store.stores import Clock, FaultyObjects, in_memory, store_over
from tests.waiting import until

ACME, UMBRA = "acme-0123456789abcdef", "umbra-0123456789abcdef"
CHAT, RENDER, RESPONSES, MESSAGES, FILES = (
    *("/v1/chat/completions", "/v1/chat/completions/render", "/v1/responses", "/v1/messages", "/v1/files"),
)
DOCUMENT = pdf([page_of(number) for number in range(4)])
LONG = pdf([page_of(number) for number in range(MAX_IMAGES + 1)])
LIMITS = DocumentLimits(max_pages=MAX_IMAGES + 2, max_bytes=10_000, max_dpi=200)
URL = "https://example.com/a.pdf"
TEXT = {"type": "text", "text": "?"}


def data_url(data: bytes = DOCUMENT) -> str:
    return "data:application/pdf;base64," + base64.b64encode(data).decode()


@dataclass
class Desk:
    """What a frontend did with documents."""

    counted: list[str] = field(default_factory=list)
    made: list[tuple[int, int]] = field(default_factory=list)
    damaged: int = 0
    """A page that cannot be drawn."""

    objects: FaultyObjects = field(default_factory=lambda: FaultyObjects(in_memory()))

    async def count(self, document: Media, /, *, group: Hashable | None = None, tenant: str = "") -> int:
        assert group is not None
        self.counted.append(tenant)
        return count_pages(document.data)

    async def process(self, media: Media, options: Mapping[str, object], **_: object) -> Feature:
        assert not options
        if media.page is None:
            return drawn(media)
        assert media.data.startswith(b"%PDF-")
        if media.page.number == self.damaged:
            raise MediaUndecodable(f"{media.subject} is damaged")
        self.made.append((media.page.number, media.page.dpi))
        return drawn(Media("image", b"%d" % (10 * media.page.number)))

    def reset(self) -> None:
        self.counted.clear()
        self.made.clear()
        self.objects.calls.clear()


async def fetch(url: Url, tenant: Tenant, /, **_: object) -> bytes:
    del url, tenant
    return DOCUMENT


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
async def served(tmp_path: Path, parts_renderer: ChatRenderer, desk: Desk) -> AsyncIterator[Rig]:
    """Its worker holds what it has got, and its frontend caches nothing."""
    pipeline = Drawing(parts_renderer, NoCache()).pipeline
    store = await store_over(desk.objects, Clock(), key=pipeline.key)
    documents = Documents(desk.count, LIMITS)
    pipeline = replace(pipeline, process=desk.process, files=FileSources(store), documents=documents, fetch=fetch)
    keys = Keyring([("acme", ACME), ("umbra", UMBRA)])
    async with rig(tmp_path, pipeline, engine_bytes=256 * FEATURE_BYTES, keys=keys) as made:
        made.service.media_store = store
        made.client.headers["authorization"] = f"Bearer {ACME}"
        yield made


def chat(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts, TEXT]}]}


def responses(part: dict[str, Any]) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [part, {"type": "input_text", "text": "?"}]}]}


def messages(part: dict[str, Any]) -> dict[str, Any]:
    return {**chat(part), "max_tokens": 8}


def file(**fields: object) -> dict[str, Any]:
    return {"type": "file", "file": {"filename": "a.pdf", "file_data": data_url(), **fields}}


def block(source: dict[str, Any], **fields: object) -> dict[str, Any]:
    return {"type": "document", "source": source, **fields}


async def upload(served: Rig, data: bytes = DOCUMENT) -> str:
    reply = await served.client.post(FILES, files={"file": ("a.pdf", data)}, data={"purpose": "user_data"})
    assert reply.status_code == 200, reply.text
    file_id: str = reply.json()["id"]
    return file_id


async def items_of(served: Rig, path: str, body: dict[str, Any]) -> Any:
    await served.ok(path, body)
    assert served.engine.last is not None
    items = served.engine.last.prompt.items
    await until(lambda: all(served.worker.holding(item.digest) is not None for item in items))
    return items


BASE64 = {"type": "base64", "media_type": "application/pdf", "data": base64.b64encode(DOCUMENT).decode()}
INLINE = {
    "chat": (CHAT, chat(file())),
    "chat, by URL": (CHAT, chat({"type": "file", "file": {"file_url": URL}})),
    "Responses": (RESPONSES, responses({"type": "input_file", "filename": "a.pdf", "file_data": data_url()})),
    "Responses, by URL": (RESPONSES, responses({"type": "input_file", "file_url": URL})),
    "Messages": (MESSAGES, messages(block(BASE64))),
    "Messages, by URL": (MESSAGES, messages(block({"type": "url", "url": URL}, cache_control={"type": "ephemeral"}))),
    "a tool's result": (
        MESSAGES,
        messages({"type": "tool_result", "tool_use_id": "a", "content": [block(BASE64)]}),
    ),
}
BY_ID: Mapping[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "chat": (CHAT, lambda id_: chat({"type": "file", "file": {"file_id": id_}})),
    "Responses": (RESPONSES, lambda id_: responses({"type": "input_file", "file_id": id_})),
    "Messages": (MESSAGES, lambda id_: messages(block({"type": "file", "file_id": id_}))),
}


async def test_a_document_is_its_pages_in_order_in_every_api_and_form(served: Rig, desk: Desk) -> None:
    expected = await items_of(served, CHAT, chat(file()))
    assert len(set(expected)) == 4
    assert desk.made == [(number, 150) for number in (1, 2, 3, 4)]
    desk.reset()
    for path, body in INLINE.values():
        assert await items_of(served, path, body) == expected
    file_id = await upload(served)
    for path, of_id in BY_ID.values():
        assert await items_of(served, path, of_id(file_id)) == expected
    assert (desk.counted, desk.made, desk.objects.calls.count("get")) == ([], [], 0)
    assert served.service.budget.in_flight == 0


async def test_the_prompt_is_that_of_the_same_pages_sent_as_images(served: Rig) -> None:
    before, after = {"type": "text", "text": "first"}, {"type": "text", "text": "then"}
    prompts = []
    for parts in ([file()], [image_part(10 * number) for number in (1, 2, 3, 4)]):
        await served.ok(CHAT, chat(before, *parts, after))
        assert served.engine.last is not None
        prompts.append(served.engine.last.prompt)
    assert prompts[0].token_ids == prompts[1].token_ids
    assert prompts[0].timeline == prompts[1].timeline


async def test_a_file_that_nobody_has_opened_is_read_twice_at_most_whatever_its_pages(served: Rig, desk: Desk) -> None:
    """To count them, and to make them once they are missing again."""
    path, of_id = BY_ID["chat"]
    file_id = await upload(served)
    await items_of(served, path, of_id(file_id))
    assert (desk.objects.calls.count("get"), desk.counted, len(desk.made)) == (1, ["acme"], 4)
    desk.reset()
    await items_of(served, path, chat({"type": "file", "file": {"file_id": file_id, "dpi": 100}}))
    assert (desk.objects.calls.count("get"), desk.counted, len(desk.made)) == (1, [], 4)
    assert served.service.budget.in_flight == 0


async def test_mutant_that_forgets_its_counts_opens_the_document_with_each_question(
    served: Rig, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MediaNames, "remember_pages", lambda *_: None)
    for _ in range(2):
        await served.ok(CHAT, chat(file()))
    assert len(desk.counted) == 2


async def test_another_tenant_shares_neither_the_pages_nor_their_number_S12(served: Rig, desk: Desk) -> None:
    ours = await items_of(served, CHAT, chat(file()))
    file_id = await upload(served)
    desk.reset()
    salted = await items_of(served, CHAT, {**chat(file()), "cache_salt": "a user's"})
    assert not set(ours) & set(salted)
    assert (desk.counted, len(desk.made)) == (["acme"], 4)
    desk.reset()
    served.client.headers["authorization"] = f"Bearer {UMBRA}"
    theirs = await items_of(served, CHAT, chat(file()))
    assert not {item.digest for item in ours} & {item.digest for item in theirs}
    assert (desk.counted, len(desk.made)) == (["umbra"], 4)
    for path, of_id in BY_ID.values():
        assert (await served.post(path, of_id(file_id))).status_code == 404


async def test_an_inspection_leaves_no_trace_and_gives_the_same_prompt(served: Rig, desk: Desk) -> None:
    rendered = await served.ok(RENDER, chat(file()))
    assert len(rendered["features"]["mm_hashes"]["image"]) == 4
    desk.reset()
    items = await items_of(served, CHAT, chat(file()))
    assert (desk.counted, len(desk.made)) == (["acme"], 4)
    assert [item.digest.hex() for item in items] == rendered["features"]["mm_hashes"]["image"]


@pytest.mark.parametrize(
    ("pages", "numbers"), [("2", [2]), ("2-3", [2, 3]), ("3-", [3, 4]), ("4-100", [4]), ("1-", [1, 2, 3, 4])]
)
async def test_a_range_chooses_pages(served: Rig, desk: Desk, pages: str, numbers: list[int]) -> None:
    whole = await items_of(served, CHAT, chat(file()))
    desk.reset()
    for path, body in (
        (CHAT, chat(file(page_range=pages))),
        (RESPONSES, responses({"type": "input_file", "file_data": data_url(), "page_range": pages})),
        (MESSAGES, messages(block(BASE64, page_range=pages))),
    ):
        assert [*await items_of(served, path, body)] == [whole[number - 1] for number in numbers]
    assert desk.made == []


async def test_another_resolution_makes_other_items(served: Rig, desk: Desk) -> None:
    whole = await items_of(served, CHAT, chat(file()))
    desk.reset()
    finer = await items_of(served, MESSAGES, messages(block(BASE64, dpi=200)))
    assert not set(whole) & set(finer)
    assert desk.made == [(number, 200) for number in (1, 2, 3, 4)]


async def test_the_versions_of_pdfium_make_other_items(
    served: Rig, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await items_of(served, CHAT, chat(file()))
    monkeypatch.setattr("semel.render.documents.pdfium_version", lambda: "another")
    assert not set(before) & set(await items_of(served, CHAT, chat(file())))
    assert len(desk.made) == 8


PART = "messages[0].content[0]"
WRONG: Mapping[str, tuple[dict[str, Any], int, str, str]] = {
    "pages of one": (file(file_data=data_url(LONG)), 400, PART, f"has {MAX_IMAGES + 1} images"),
    "pages of all": (
        file(file_data=data_url(pdf([b""] * 11))),
        413,
        PART,
        "11 pages or more; the limit of a request is 10",
    ),
    "bytes": (file(file_data=data_url(DOCUMENT + bytes(10_000))), 413, PART, "(--max-document-bytes)"),
    "dpi": (file(dpi=201), 413, PART, "its dpi is 201; the limit is 200 (--max-document-dpi)"),
    "dpi of another type": (file(dpi="fine"), 400, f"{PART}.dpi", "whole number"),
    "dpi of nothing": (file(dpi=0), 400, f"{PART}.dpi", "whole number"),
    "a page behind the last": (file(page_range="5"), 400, PART, "begins with page 5 of 4"),
    "no range": (file(page_range="3-2"), 400, f"{PART}.page_range", '"2-5"'),
    "a range of another type": (file(page_range=[1, 2]), 400, f"{PART}.page_range", '"2-5"'),
    "a damaged file": (file(file_data=data_url(b"%PDF-1.7")), 400, PART, "complete PDF"),
    "no base64": (file(file_data="data:application/pdf;base64,=="), 400, PART, "the document is not valid base64"),
    "an image that says it is a document": (file(file_data=data_url(b"\x89PNG")), 400, PART, "complete PDF"),
    "a document as an image": (
        {"type": "image_url", "image_url": {"url": data_url()}},
        400,
        PART,
        "cannot be used as image",
    ),
    "a text": (file(file_data="data:text/plain;base64,QQ=="), 400, PART, "PDFs and images only"),
    "a URL and an id": ({"type": "file", "file": {"file_url": URL, "file_id": "x"}}, 400, PART, "send one of them"),
}


@pytest.mark.parametrize("case", WRONG)
async def test_a_refusal_names_the_part_and_the_limit(served: Rig, desk: Desk, case: str) -> None:
    part, status, param, words = WRONG[case]
    reply = await served.post(CHAT, chat(part))
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (status, param), reply.text
    assert words in error["message"]
    assert desk.made == []
    assert served.service.budget.in_flight == 0


async def test_refusals_of_the_other_apis_name_their_own_parts(served: Rig) -> None:
    for path, body, place in (
        (RESPONSES, responses({"type": "input_file", "file_data": data_url(LONG)}), "input[0].content[0]"),
        (MESSAGES, messages(block({**BASE64, "media_type": "text/plain"})), f"{PART}.source.media_type"),
        (MESSAGES, messages(block({"type": "text", "data": "?"})), f"{PART}.source"),
        (MESSAGES, messages(block(BASE64, citations={"enabled": True})), f"{PART}.citations"),
    ):
        reply = await served.post(path, body)
        assert reply.status_code == 400, reply.text
        assert place in reply.text


async def test_a_page_that_cannot_be_drawn_is_told_with_its_number_and_its_part(served: Rig, desk: Desk) -> None:
    desk.damaged = 2
    for path, body in INLINE.values():
        reply = await served.post(path, body)
        error = reply.json()["error"]
        place = "input[0].content[0]" if path == RESPONSES else PART
        assert (reply.status_code, "page 2 of the document is damaged" in error["message"]) == (400, True), reply.text
        assert place in (error.get("param") or error["message"])
    assert served.service.budget.in_flight == 0


async def test_a_title_and_a_context_are_texts_before_the_pages(served: Rig) -> None:
    plain = await items_of(served, MESSAGES, messages(block(BASE64)))
    assert served.engine.last is not None
    tokens = len(served.engine.last.prompt.token_ids)
    assert await items_of(served, MESSAGES, messages(block(BASE64, title="A", context="of B"))) == plain
    assert len(served.engine.last.prompt.token_ids) > tokens


async def test_a_document_has_one_id_by_which_it_is_asked_about_again(served: Rig, desk: Desk) -> None:
    """No media store is needed: what the worker has is only named."""
    served.service.media_store = None
    answer = await served.ok(CHAT, {**chat(file()), "return_media_ids": True})
    (media_id,) = answer["media_ids"]
    first = served.engine.last
    desk.reset()
    for path, of_id in BY_ID.values():
        await items_of(served, path, of_id(media_id))
        assert first is not None
        assert served.engine.last is not None
        assert served.engine.last.prompt.items == first.prompt.items
    assert (desk.counted, desk.made) == ([], [])


async def test_a_document_that_is_in_a_request_twice_is_held_once_and_charged_S21(served: Rig) -> None:
    """What a request keeps until its first token is added up over its items, and equal pages are one."""
    parts = [file(page_range=pages) for pages in ("1", "1-2", "1-3")]
    read = await served.service.serving().pipeline.read_chat(ChatRequest(chat(*parts)["messages"]), Tenant("acme"))
    held = [await read.media_of(digest) for digest in read.media]
    assert len(held) == 3
    assert len({id(one.data) for one in held}) == 1
    assert sum(one.nbytes for one in read.media.values()) == len(DOCUMENT)


async def test_a_document_that_is_in_a_request_often_is_read_and_counted_once_S18(served: Rig, desk: Desk) -> None:
    file_id = await upload(served)
    parts = [{"type": "file", "file": {"file_id": file_id, "page_range": str(page)}} for page in (1, 2, 3, 1)]
    await items_of(served, CHAT, chat(*parts))
    assert (desk.counted, desk.objects.calls.count("get")) == (["acme"], 1)
    desk.reset()
    fresh = {"file_data": data_url(DOCUMENT + b"%")}
    await items_of(served, CHAT, chat(*(file(**fresh, page_range=pages) for pages in ("1", "2-3", "1-"))))
    assert desk.counted == ["acme"]


async def test_what_grows_with_a_request_is_done_beside_the_event_loop(
    served: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 20,000 parts: counting characters takes 30 ms, expanding documents 10; 65,000 `frames_indices`: 19 ms."""
    threads: dict[str, set[int]] = {"characters": set(), "options": set(), "pages": set()}
    strings = Conversation.strings

    def expanding(*arguments: Any) -> Any:
        threads["pages"].add(threading.get_ident())
        return expand_documents(*arguments)

    def identifying(**arguments: Any) -> Identity:
        threads["options"].add(threading.get_ident())
        return Identity(**arguments)

    def reading(conversation: Conversation) -> Any:
        threads["characters"].add(threading.get_ident())
        return strings(conversation)

    monkeypatch.setattr(Conversation, "strings", reading)
    monkeypatch.setattr("semel.render.pipeline.expand_documents", expanding)
    monkeypatch.setattr("semel.render.pipeline.Identity", identifying)
    light = chat(file())["messages"]
    media_io = {"video": {"frames_indices": [*range(5_000)]}}
    for request, heavy in (
        (ChatRequest(light), set()),
        (ChatRequest(chat(file(), *[TEXT] * 200)["messages"]), {"characters", "pages"}),
        (ChatRequest(light, media_io_kwargs=media_io), {"options"}),
    ):
        await served.service.serving().pipeline.read_chat(request, Tenant("acme"), max_chars=1 << 20)
        beside = {name for name, seen in threads.items() if seen - {threading.get_ident()}}
        assert beside == heavy
        for seen in threads.values():
            seen.clear()
