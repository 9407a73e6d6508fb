"""Stored responses: continued, read and deleted at any frontend, by their tenant alone; never in an answer's way."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from semel.core import Feature, Media, Tenant
from semel.frontend.api.responses import stored as stored_module
from semel.frontend.api.responses.input import add_items
from semel.frontend.api.responses.stored import Conversation
from semel.frontend.routes import response_store
from semel.frontend.service import ServedModel
from semel.render import ChatRenderer
from semel.render.documents import Documents
from semel.store.names import owner_name
from semel.store.records import SealedRecords
from semel.store.store import MediaStore
from tests.effort import examples
from tests.frontend.agents import Answer
from tests.frontend.conversing import ANSWERS, RESPONSES, TENANTS, TTL_S, Conversing, Life, conversing, final_of, image
from tests.frontend.test_documents import LIMITS, Desk, data_url
from tests.render.drawn import drawn
from tests.security.worlds import share_records

LIVES = examples(60)
STEPS = 30
ACME = TENANTS[0]
LOOK: dict[str, Any] = {
    "input": [{"role": "user", "content": [image(1), {"type": "input_text", "text": "look"}]}],
}


@pytest.fixture
async def world(tmp_path: Path, parts_renderer: ChatRenderer) -> AsyncIterator[Conversing]:
    async with conversing(tmp_path, parts_renderer) as made:
        yield made


async def lives(world: Conversing, count: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in range(count):
        await world.renew()
        life = Life(world, Random(seed))
        try:
            await life.live(STEPS)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
        counts.update(life.counts)
    return counts


async def test_in_any_life_a_response_is_what_its_client_was_answered(world: Conversing) -> None:
    counts = await lives(world, LIVES)
    kinds = "created", "forked", "found", "unknown", "refused", "deleted"
    assert min(counts[what] for what in kinds) > LIVES / 4, counts


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3_600)
async def test_in_two_thousand_lives_a_response_is_what_its_client_was_answered(world: Conversing) -> None:
    counts = await lives(world, 2_000)
    assert counts["media gone"] > 0


def _without_salt(patch: pytest.MonkeyPatch) -> None:
    content = SealedRecords._content
    patch.setattr(SealedRecords, "_content", lambda self, tenant, name: content(self, Tenant(tenant.name), name))


def _believing_the_index(patch: pytest.MonkeyPatch) -> None:
    async def locate(self: MediaStore, tenant: str, digest: Any) -> Any:
        return self._index.get(owner_name(tenant, self._key), digest, self._clock())

    patch.setattr(MediaStore, "find", locate)


def _only_messages(patch: pytest.MonkeyPatch) -> None:
    def only_messages(items: Any, where: str, made: Any) -> None:
        add_items([item for item in items if item["type"] == "message"], where, made)

    patch.setattr(stored_module, "add_items", only_messages)


def _written_after_the_event(patch: pytest.MonkeyPatch) -> None:
    write = response_store.ResponseWriter._write
    tasks = set[Any]()

    async def later(self: response_store.ResponseWriter, response: Any) -> bool:
        async def do() -> None:
            await asyncio.sleep(0.05)
            await write(self, response)

        tasks.add(asyncio.create_task(do()))
        return True

    patch.setattr(response_store.ResponseWriter, "_write", later)


def _only_new_items(patch: pytest.MonkeyPatch) -> None:
    stored_items = stored_module.stored_items

    def only_new(items: Any, name: str, before: Conversation, files: Any) -> bytes:
        return stored_items(items, name, Conversation(), files[before.media :])

    patch.setattr(response_store, "stored_items", only_new)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "tenants share their responses": share_records,
    "salts share their responses": _without_salt,
    "a frontend believes its own index": _believing_the_index,
    "calls and reasoning are forgotten": _only_messages,
    "the event is sent before the write": _written_after_the_event,
    "only the new items are kept": _only_new_items,
}


@pytest.mark.slow
@pytest.mark.parametrize("mutate", MUTANTS.values(), ids=MUTANTS)
async def test_a_mutant_is_found(
    world: Conversing, monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None]
) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        await lives(world, 60)


async def create(world: Conversing, frontend: int = 0, **fields: Any) -> dict[str, Any]:
    reply = await world.ask(frontend, ACME, "POST", RESPONSES, json={**LOOK, **fields})
    assert reply.status_code == 200, reply.text
    return final_of(reply)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("broken", ["records", "files"])
@pytest.mark.parametrize("fault", ["gone", "full"])
async def test_a_store_that_fails_fails_no_answer_and_the_answer_says_that_it_is_not_stored(
    world: Conversing, broken: str, fault: str, stream: bool
) -> None:
    getattr(world, broken).fault = fault
    answer = await create(world, stream=stream)
    assert (answer["store"], answer["output"][0]["content"][0]["text"]) == (False, "hello there")
    assert world.frontends[0].service.stored_responses == {"failed": 1}
    calls = len(world.records.calls)
    assert (await create(world, stream=stream))["store"] is False
    assert len(world.records.calls) == calls  # it is not asked again at once
    getattr(world, broken).fault = ""
    reply = await world.ask(1, ACME, "GET", f"{RESPONSES}/{answer['id']}")
    assert reply.status_code == 404


@pytest.mark.parametrize("writes", [0, 1])
async def test_a_frontend_that_is_killed_at_any_write_leaves_a_whole_response_or_none(
    world: Conversing, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """Its client has heard of the end only if it is there."""
    monkeypatch.setattr("semel.frontend.routes.response_store.secrets.token_hex", lambda _: "0" * 32)
    world.records.killed_after = writes
    has_ended = False
    with contextlib.suppress(asyncio.CancelledError):
        has_ended = (await create(world, stream=True))["status"] == "completed"
    reply = await world.ask(1, ACME, "GET", f"{RESPONSES}/resp_{'0' * 32}")
    assert (reply.status_code == 200) is has_ended is bool(writes)


async def test_a_response_is_unknown_until_its_last_event_and_then_known_everywhere(
    world: Conversing, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, end = world.answer.outputs(streamed=True), asyncio.Event()

    class Waiting:
        async def __aiter__(self) -> Any:
            for output in answers[:-1]:
                yield output
            await end.wait()
            yield answers[-1]

        async def close(self) -> None:
            pass

    async def submit(_: Any) -> Any:
        return Waiting()

    monkeypatch.setattr(world.frontends[0].engine, "submit", submit)
    asking = asyncio.create_task(world.ask(0, ACME, "POST", RESPONSES, json={**LOOK, "stream": True}))
    for _ in range(20):
        await asyncio.sleep(0)
    files = [path async for page in world.records.list("") for path, _ in page]
    assert not files
    end.set()
    answer = final_of(await asking)
    assert (await world.ask(1, ACME, "GET", f"{RESPONSES}/{answer['id']}")).json() == answer


async def test_media_that_are_gone_are_named_with_the_code_that_clients_know(world: Conversing) -> None:
    answer = await create(world)
    (item,) = (await world.ask(1, ACME, "GET", f"{RESPONSES}/{answer['id']}/input_items")).json()["data"]
    file_id = item["content"][0]["file_id"]
    assert (await world.ask(0, ACME, "DELETE", f"/v1/files/{file_id}")).status_code == 200
    request = {"input": "again", "previous_response_id": answer["id"]}
    reply = await world.ask(1, ACME, "POST", RESPONSES, json=request)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (404, "unknown_media")
    assert error["param"] == "previous_response_id[0].content[0]"
    assert file_id in error["message"]
    assert (await world.ask(0, ACME, "POST", RESPONSES, json=request)).status_code == 200  # its worker has the image


async def test_an_image_is_stored_once_however_often_it_is_sent(world: Conversing) -> None:
    first = await create(world)
    await create(world, 1, previous_response_id=first["id"])
    listed = (await world.ask(0, ACME, "GET", "/v1/files")).json()["data"]
    assert len(listed) == 1
    assert world.files.calls.count("put") == 1


async def test_a_document_is_stored_as_one_file_and_continued_with_all_its_pages(world: Conversing) -> None:
    async def process(media: Media, options: Mapping[str, object], **_: object) -> Feature:
        return drawn(Media("image", b"%d" % (10 * media.page.number) if media.page else media.data))

    for one in world.frontends:
        serving = one.service.serving()
        pipeline = replace(serving.pipeline, process=process, documents=Documents(Desk().count, LIMITS))
        one.service.begin(ServedModel(serving.fleet, serving.contract, pipeline))
    document = {"type": "input_file", "file_data": data_url(), "page_range": "1-3"}
    same = {"type": "file", "file": {"file_data": data_url(), "page_range": "1-3"}}  # as in a chat
    content = [image(1), document, image(2), same, {"type": "input_text", "text": "look"}]
    first = await create(world, input=[{"role": "user", "content": content}])
    asked = world.prompt()
    assert first["store"] is True
    assert len(asked[1]) == 2 + 2 * 3
    (item,) = (await world.ask(1, ACME, "GET", f"{RESPONSES}/{first['id']}/input_items")).json()["data"]
    kinds = ["input_image", "input_file", "input_image", "input_file"]
    ids = [part["file_id"] for part in item["content"][:4]]
    assert [part["type"] for part in item["content"][:4]] == kinds
    assert ids[1] == ids[3] and len(set(ids)) == 3
    assert item["content"][1] == item["content"][3]
    assert not [part for part in item["content"] if "file_data" in part]
    await create(world, 1, input="again", previous_response_id=first["id"])
    assert world.prompt()[1] == asked[1]
    assert len((await world.ask(0, ACME, "GET", "/v1/files")).json()["data"]) == 3


async def test_instructions_are_not_carried_over(world: Conversing) -> None:
    first = await create(world, instructions="speak like a pirate")
    await create(world, 1, previous_response_id=first["id"])
    assert world.last is not None
    decoded = world.frontends[1].pipeline.tokenizer.decode(world.last.prompt.token_ids)
    assert "pirate" not in decoded and "hello there" in decoded


@pytest.mark.parametrize("answer", ANSWERS)
async def test_what_goes_on_with_the_assistant_is_as_if_the_client_had_sent_all(
    world: Conversing, answer: Answer
) -> None:
    world.answer = answer
    first = await create(world)
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "a cat"}
    for begun in ([call], [{"role": "assistant", "content": "so"}, call], [{"role": "assistant", "content": "so"}]):
        new = [*begun, result]
        await create(world, 1, input=new, previous_response_id=first["id"], instructions="be brief", store=False)
        continued = world.prompt()
        await create(world, input=[*LOOK["input"], *first["output"], *new], instructions="be brief", store=False)
        assert continued == world.prompt()


async def test_tokens_are_counted_with_what_is_continued(world: Conversing) -> None:
    first = await create(world)
    path, body = f"{RESPONSES}/input_tokens", {"input": "again", "previous_response_id": first["id"]}
    counted = (await world.ask(1, ACME, "POST", path, json=body)).json()["input_tokens"]
    answer = await world.ask(1, ACME, "POST", RESPONSES, json=body)
    assert counted == answer.json()["usage"]["input_tokens"]


async def test_only_the_ids_of_the_new_media_are_returned(world: Conversing) -> None:
    first = await create(world)
    new = [{"role": "user", "content": [image(2)]}]
    answer = await create(world, input=new, previous_response_id=first["id"], return_media_ids=True)
    assert len(answer["media_ids"]) == 1
    assert "media_ids" not in first


async def test_a_record_that_was_changed_is_answered_as_unknown(world: Conversing) -> None:
    answer = await create(world)
    (path,) = [path async for page in world.records.list("") for path, _ in page]
    data = bytearray(await world.records.get(path, 1 << 20) or b"")
    data[-9] ^= 1
    await world.records.put(path, data)
    assert (await world.ask(1, ACME, "GET", f"{RESPONSES}/{answer['id']}")).status_code == 404


async def test_a_conversation_that_is_too_long_to_be_sent_is_not_stored(world: Conversing) -> None:
    service = world.frontends[0].service
    service.body = replace(service.body, max_text_bytes=500)
    first = await create(world)
    again = await create(world, previous_response_id=first["id"])
    assert (first["store"], again["store"], again["status"]) == (True, False, "completed")


async def test_what_waits_to_be_written_is_charged_and_given_back(
    world: Conversing, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged: list[int] = []
    write, budget = SealedRecords.write, world.frontends[0].service.budget

    async def watched(self: SealedRecords, *rest: Any) -> None:
        charged.append(budget.in_flight)
        await write(self, *rest)

    monkeypatch.setattr(SealedRecords, "write", watched)
    await create(world, input="x" * 3_000, stream=True)
    assert charged[0] > 2 * 3_000  # the items, and the record
    assert budget.in_flight == 0


async def test_a_response_without_room_to_wait_is_answered_and_not_stored_S21(
    world: Conversing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drop(self: response_store.ResponseWriter, *_: Any) -> bool:
        self._drop(None)  # type: ignore[arg-type]
        return False

    monkeypatch.setattr(response_store.ResponseWriter, "_pin", lambda self, _: drop(self))
    take = response_store.ResponseWriter.take_items

    async def revoked(self: response_store.ResponseWriter, parsed: Any) -> None:
        await take(self, parsed)
        drop(self)

    monkeypatch.setattr(response_store.ResponseWriter, "take_items", revoked)
    answer = await create(world, stream=True)
    assert (answer["store"], answer["status"]) == (False, "completed")
    assert world.frontends[0].service.budget.in_flight == 0


async def test_the_parameters_of_a_list_are_checked_and_include_is_ignored(world: Conversing) -> None:
    answer = await create(world)
    path = f"{RESPONSES}/{answer['id']}/input_items"
    for params in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "nobody"}):
        assert (await world.ask(0, ACME, "GET", path, params=params)).status_code == 400
    assert (await world.ask(0, ACME, "GET", path, params={"include[]": "x"})).status_code == 200
    one = f"{RESPONSES}/{answer['id']}"
    assert (await world.ask(0, ACME, "GET", one, params={"stream": "true"})).status_code == 400


async def test_a_name_of_the_client_is_not_that_of_a_stored_response(world: Conversing) -> None:
    """Two requests may have the same."""
    ids = {(await create(world, request_id="mine"))["id"] for _ in range(2)}
    assert len(ids) == 2 and "resp_mine" not in ids


async def test_after_its_time_a_response_is_gone(world: Conversing) -> None:
    answer = await create(world)
    world.clock.now_s += TTL_S + 1
    assert (await world.ask(1, ACME, "GET", f"{RESPONSES}/{answer['id']}")).status_code == 404


async def test_without_the_flag_nothing_is_kept_and_what_needs_it_says_how(world: Conversing) -> None:
    for one in world.frontends:
        one.service.response_records = None
    answer = await create(world, store=True)
    assert answer["store"] is False and not world.records.calls[2:]
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
        reply = await world.ask(0, ACME, method, f"{RESPONSES}/{answer['id']}{path}")
        assert reply.status_code == 404 and "--store-responses" in reply.text
    reply = await world.ask(0, ACME, "POST", RESPONSES, json={**LOOK, "previous_response_id": answer["id"]})
    assert reply.status_code == 400 and "--store-responses" in reply.text


async def test_fifty_turns_are_read_in_one_record(world: Conversing) -> None:
    previous = (await create(world, input="turn 0"))["id"]
    for turn in range(1, 50):
        world.answer = ANSWERS[turn % 2]
        previous = (await create(world, turn % 2, input=f"turn {turn}", previous_response_id=previous))["id"]
    before = Counter(world.records.calls)
    await create(world, input="last", previous_response_id=previous, store=False)
    assert Counter(world.records.calls) - before == {"list": 1, "get": 1}
