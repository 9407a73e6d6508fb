"""Two frontends over one store of responses, and a slow model of what clients may see of them.

The model keeps every conversation as its client could send it: whole, with its images in it. So a continuation is
right if the engine gets what it would get of that.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from blake3 import blake3
from obstore.store import MemoryStore
from openai.types.responses import Response, ResponseItem
from pydantic import TypeAdapter

from semel.cache import LruCache
from semel.core import Keyring, Submission
from semel.engine import Stream
from semel.frontend.limits import RefusalLimits
from semel.frontend.service import ServedModel
from semel.render import ChatRenderer
from semel.render.file_sources import FileSources
from semel.store.names import file_id, public_id
from semel.store.objects import BucketObjects
from semel.store.records import SealedRecords
from tests.frontend.agents import CALLS, Answer
from tests.frontend.hearing import Spoken
from tests.frontend.rig import KEY, Rig, rig
from tests.render.drawn import FEATURE_BYTES, Drawing
from tests.store.stores import Clock, FaultyObjects, store_over

TTL_S = 1_000
KEYS = {"acme": "acme-0123456789abcdef", "umbra": "umbra-0123456789abcdef"}
TENANTS: Sequence[tuple[str, str | None]] = (("acme", None), ("acme", "salt"), ("umbra", None), ("umbra", "salt"))
RESPONSES = "/v1/responses"
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)
ANSWERS = (
    Answer(content="hello there"),
    Answer("let me think", "42"),
    Answer("hm", "I look.", CALLS, "tool_calls"),
    Answer("hm", "hello th", (), "length"),
)


def image(number: int) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(str(number).encode()).decode()}"
    return {"type": "input_image", "detail": "auto", "image_url": url}


@dataclass
class Conversing:
    """Frontends, each with a worker of its own, over the same objects."""

    frontends: list[Rig]
    answer: Answer = field(default_factory=lambda: ANSWERS[0])
    last: Submission | None = None
    clock: Clock = field(default_factory=Clock)
    files: FaultyObjects = field(default_factory=lambda: FaultyObjects(BucketObjects(MemoryStore(), 600)))
    records: FaultyObjects = field(default_factory=lambda: FaultyObjects(BucketObjects(MemoryStore(), 600)))

    async def submit(self, submission: Submission) -> Stream:
        self.last = submission
        assert submission.parsing is not None
        return Spoken(self.answer.outputs(streamed=submission.parsing.stream))

    async def renew(self) -> None:
        """Begin with empty stores, which each frontend opens for itself, and with nothing remembered."""
        self.clock = Clock()
        self.files = FaultyObjects(BucketObjects(MemoryStore(), 600))
        self.records = FaultyObjects(BucketObjects(MemoryStore(), 600))
        for one in self.frontends:
            files = await store_over(self.files, self.clock, ttl_s=TTL_S, key=KEY)
            records = SealedRecords(await store_over(self.records, self.clock, ttl_s=TTL_S, key=KEY), KEY)
            serving, one.service.media_store = one.service.serving(), files
            one.service.response_records = records
            pipeline = replace(serving.pipeline, files=FileSources(files), key=KEY)
            one.service.begin(ServedModel(serving.fleet, serving.contract, pipeline))

    async def ask(
        self, frontend: int, tenant: tuple[str, str | None], method: str, path: str, **request: Any
    ) -> httpx.Response:
        name, salt = tenant
        if method == "POST":
            request["json"] = {**request["json"], **({} if salt is None else {"cache_salt": salt})}
        elif salt is not None:
            request["params"] = {**request.get("params", {}), "cache_salt": salt}
        headers = {"authorization": f"Bearer {KEYS[name]}"}
        return await self.frontends[frontend].client.request(method, path, headers=headers, **request)

    def prompt(self) -> tuple[Any, ...]:
        """What the engine was given last."""
        assert self.last is not None
        prompt = self.last.prompt
        return tuple(prompt.token_ids), tuple(placed.digest for placed in prompt.items), self.last.cache_salt


@asynccontextmanager
async def conversing(folder: Path, renderer: ChatRenderer, count: int = 2) -> AsyncIterator[Conversing]:
    made = Conversing([])
    async with AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for number in range(count):
            (home := folder / str(number)).mkdir(mode=0o700)
            pipeline = Drawing(renderer, LruCache(64 * FEATURE_BYTES)).pipeline
            keys = Keyring(list(KEYS.items()))
            one = await stack.enter_async_context(rig(home, pipeline, keys=keys, engine_bytes=64 * FEATURE_BYTES))
            one.service.refusals = RefusalLimits(per_s=0)
            patch.setattr(one.engine, "submit", made.submit)
            made.frontends.append(one)
        await made.renew()
        yield made


def final_of(reply: httpx.Response) -> dict[str, Any]:
    """The whole answer, from its JSON or from the last event of its stream."""
    if reply.headers["content-type"].startswith("application/json"):
        found: dict[str, Any] = reply.json()
    else:
        found = json.loads(reply.text.rstrip().rpartition("data: ")[2])["response"]
    Response.model_validate(found, strict=True)
    return found


@dataclass
class Known:
    """A response that was made, as the model has it."""

    tenant: tuple[str, str | None]
    items: list[dict[str, Any]]
    """What it answers, whole, as its client could send it."""

    answer: dict[str, Any]
    media: dict[int, float]
    """Its images, and until when each is there for sure."""

    expires_s: float
    is_stored: bool = True


@dataclass
class Life:
    """A random life of a store of responses: every step is checked when it is done."""

    world: Conversing
    draw: Random
    known: dict[str, Known] = field(default_factory=dict)
    uploaded: dict[tuple[str, int], float] = field(default_factory=dict)
    """By tenant and image: until when it is a file."""

    counts: dict[str, int] = field(default_factory=dict)

    async def live(self, steps: int) -> None:
        kinds = [self.create] * 8 + [self.look] * 4 + [self.delete, self.wait]
        for _ in range(steps):
            await self.draw.choice(kinds)()

    def has(self, id_: str, tenant: tuple[str, str | None]) -> bool:
        one = self.known.get(id_)
        now_s = self.world.clock.now_s
        return one is not None and one.is_stored and one.tenant == tenant and one.expires_s > now_s

    def name(self) -> str:
        """An id: mostly one that was given, at times one that never was."""
        if not self.known or self.draw.random() < 0.1:
            return f"resp_{self.draw.getrandbits(128):032x}" if self.draw.random() < 0.7 else "resp_x"
        return self.draw.choice(list(self.known))

    def tenant(self, id_: str) -> tuple[str, str | None]:
        one = self.known.get(id_)
        return one.tenant if one is not None and self.draw.random() < 0.85 else self.draw.choice(TENANTS)

    def items(self, after: Known | None) -> str | list[dict[str, Any]]:
        calls = [] if after is None else [one for one in after.answer["output"] if one["type"] == "function_call"]
        if calls and self.draw.random() < 0.8:
            return [
                {
                    "type": "function_call_output",
                    "call_id": call["call_id"],
                    "output": [image(self.draw.randrange(3)), {"type": "input_text", "text": "seen"}],
                }
                for call in calls
            ]
        if self.draw.random() < 0.3:
            return f"say {self.draw.randrange(9)}"
        images = [image(self.draw.randrange(6)) for _ in range(self.draw.choice([0, 1, 1, 2]))]
        item = {"role": "user", "content": [*images, {"type": "input_text", "text": f"look {self.draw.randrange(9)}"}]}
        forced = [{"role": "developer", "content": "be short"}] if self.draw.random() < 0.2 else []
        return [*forced, item]

    async def create(self) -> None:
        world, draw = self.world, self.draw
        previous = self.name() if draw.random() < 0.75 else None
        tenant = draw.choice(TENANTS) if previous is None else self.tenant(previous)
        before = self.known.get(previous or "") if previous and self.has(previous, tenant) else None
        if before is not None and sum(map(_images, before.items)) > 4:
            previous = before = None  # the model takes eight images
        new, frontend = self.items(before), draw.randrange(2)
        request: dict[str, Any] = {"input": new, "stream": draw.random() < 0.5}
        if previous is not None:
            request["previous_response_id"] = previous
        if (store := draw.choice([None, None, None, True, False])) is not None:
            request["store"] = store
        if draw.random() < 0.3:
            request["instructions"] = f"rule {draw.randrange(9)}"
        world.answer = draw.choice(ANSWERS)
        reply = await world.ask(frontend, tenant, "POST", RESPONSES, json=request)
        if previous is not None and before is None:
            self.count("refused")
            await self.check_unknown(reply, previous, frontend, tenant, request)
            return
        if reply.status_code == 404:
            assert before is not None and reply.json()["error"]["code"] == "unknown_media", reply.text
            assert any(until_s <= world.clock.now_s for until_s in before.media.values()), "its media are all there"
            self.count("media gone")
            return
        assert reply.status_code == 200, reply.text
        answer, seen = final_of(reply), world.prompt()
        items = [{"role": "user", "content": new}] if isinstance(new, str) else new
        whole = [*(before.items + before.answer["output"] if before else []), *items]
        plain = {name: value for name, value in request.items() if name in ("stream", "instructions")}
        said = await world.ask(frontend, tenant, "POST", RESPONSES, json={**plain, "input": whole, "store": False})
        assert said.status_code == 200, said.text
        assert seen == world.prompt(), "the engine got another conversation"
        assert answer["store"] is (store is not False)
        assert answer["previous_response_id"] == previous
        self.keep(answer, tenant, items, whole, before)
        self.count("forked" if before is not None and self.draw.random() < 0.5 else "created")
        await self.check(answer["id"], tenant, 1 - frontend)

    def keep(
        self,
        answer: dict[str, Any],
        tenant: tuple[str, str | None],
        items: Sequence[dict[str, Any]],
        whole: list[dict[str, Any]],
        before: Known | None,
    ) -> None:
        assert answer["id"] not in self.known
        now_s, media = self.world.clock.now_s, dict(before.media) if before else {}
        for number in (number for item in items for number in _numbers(item)):
            if answer["store"]:
                if self.uploaded.get((tenant[0], number), 0) <= now_s:
                    self.uploaded[tenant[0], number] = int(now_s) + TTL_S
                media[number] = self.uploaded[tenant[0], number]
        self.known[answer["id"]] = Known(tenant, whole, answer, media, int(now_s) + TTL_S, answer["store"])

    async def check_unknown(
        self, reply: httpx.Response, id_: str, frontend: int, tenant: tuple[str, str | None], request: Mapping[str, Any]
    ) -> None:
        """Whether it is somebody else's, is gone or never was: the answer is the same, but for the id."""
        assert reply.status_code == 404, reply.text
        assert reply.json()["error"]["code"] == "previous_response_not_found"
        assert reply.json()["error"]["param"] == "previous_response_id"
        nobody = "resp_" + "0" * 32
        json_ = {**request, "previous_response_id": nobody}
        other = await self.world.ask(frontend, tenant, "POST", RESPONSES, json=json_)
        assert other.text.replace(nobody, id_) == reply.text

    async def look(self) -> None:
        if not self.known:
            return
        id_ = self.name()
        await self.check(id_, self.tenant(id_), self.draw.randrange(2))

    async def check(self, id_: str, tenant: tuple[str, str | None], frontend: int) -> None:
        """What one frontend has of a response, and of its items."""
        one = f"{RESPONSES}/{id_}"
        reply = await self.world.ask(frontend, tenant, "GET", one)
        if not self.has(id_, tenant):
            self.count("unknown")
            assert reply.status_code == 404, reply.text
            assert reply.json()["error"]["code"] == "response_not_found"
            return
        self.count("found")
        known = self.known[id_]
        assert reply.json() == known.answer
        items = await self.listed(frontend, tenant, one)
        assert len(items) == len(known.items)
        for item, sent in zip(items, known.items, strict=True):
            ITEM.validate_python(item, strict=True)
            assert _texts(item) == _texts(sent)
            files = [public_id(_file(tenant[0], number)) for number in _numbers(sent)]
            assert [part["file_id"] for part in _parts(item) if part["type"] == "input_image"] == files
        assert len({item["id"] for item in items}) == len(items)

    async def listed(self, frontend: int, tenant: tuple[str, str | None], one: str) -> list[dict[str, Any]]:
        """All items, page by page, in the order of the conversation."""
        order, found = self.draw.choice(["asc", "desc", None]), list[dict[str, Any]]()
        while True:
            params: dict[str, Any] = {"limit": self.draw.choice([1, 2, 100])} | ({"order": order} if order else {})
            params |= {"after": found[-1]["id"]} if found else {}
            page = (await self.world.ask(frontend, tenant, "GET", f"{one}/input_items", params=params)).json()
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
            found += page["data"]
            if not page["has_more"]:
                return found if order == "asc" else found[::-1]

    async def delete(self) -> None:
        if not self.known:
            return
        id_ = self.name()
        tenant, frontend = self.tenant(id_), self.draw.randrange(2)
        reply = await self.world.ask(frontend, tenant, "DELETE", f"{RESPONSES}/{id_}")
        if not self.has(id_, tenant):
            assert reply.status_code == 404, reply.text
            return
        assert reply.json() == {"id": id_, "object": "response", "deleted": True}
        self.known[id_].is_stored = False
        self.count("deleted")
        await self.check(id_, tenant, 1 - frontend)

    async def wait(self) -> None:
        self.world.clock.now_s += self.draw.choice([1, TTL_S // 3, TTL_S // 3, TTL_S])
        self.count("waited")

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


def _file(tenant: str, number: int) -> Any:
    return file_id(blake3(str(number).encode()).digest(), tenant, KEY)


def _parts(item: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = item.get("content") or item.get("output") or []
    return [] if isinstance(content, str) else content


def _numbers(item: Mapping[str, Any]) -> list[int]:
    urls = [part["image_url"] for part in _parts(item) if part.get("image_url")]
    return [int(base64.b64decode(url.partition(",")[2])) for url in urls]


def _images(item: Mapping[str, Any]) -> int:
    return len(_numbers(item))


def _texts(item: Mapping[str, Any]) -> list[str]:
    content = item.get("content") or item.get("output") or item.get("arguments") or []
    return [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]
