"""A slow and obviously right model of references in chats, and the shipped parts that are compared with it.

The model knows contents by their numbers, and every rule of docs/use-cases/agents.md by looking at everything. What
has to go from a full store is not predicted here (`tests.store.model` does that): it is seen, and has to be allowed.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from unittest.mock import patch

from blake3 import blake3
from obstore.store import MemoryStore

from semel.core import Digest, Feature, FeatureInfo, Identity, Item, Media, Tenant
from semel.errors import RequestError, ServiceError
from semel.render import ChatRenderer, ChatRequest, Pipeline
from semel.render.file_sources import FileSources
from semel.store.index import SMALLEST_BYTES, charged_bytes, newest
from semel.store.names import StoredFile, file_id, owner_name, parse_object_path, public_id
from semel.store.objects import BucketObjects
from semel.store.store import MediaStore
from tests.render.drawn import drawn
from tests.store.stores import KEY, Clock, FaultyObjects, upload_of

PNG: Final = b"\x89PNG\r\n\x1a\n"
CAPACITY: Final = 4 * SMALLEST_BYTES
TTL_S: Final = 100
STORE_TIMEOUT_S: Final = 600.0
TENANTS: Final = (Tenant("acme"), Tenant("acme", "salt"), Tenant("umbra"))
OWNERS: Final = {owner_name(name, KEY): name for name in ("acme", "umbra")}
TEXT: Final = 6
HUGE: Final = 7
CONTENTS: Final = (
    *(PNG + str(number).encode() for number in range(5)),
    PNG + bytes(2 * SMALLEST_BYTES - len(PNG)),
    b"no media",
    PNG + bytes(CAPACITY),
)
"""Five images, a large one, a text (`TEXT`), and an image that no store has room for (`HUGE`)."""

NUMBERS: Final = {content: number for number, content in enumerate(CONTENTS)}
IDS: Final = {
    (name, number): file_id(blake3(content).digest(), name, KEY)
    for name in OWNERS.values()
    for number, content in enumerate(CONTENTS)
}
FILES: Final = {digest: file for file, digest in IDS.items()}
URLS: Final = [f"data:image/png;base64,{base64.b64encode(content).decode()}" for content in CONTENTS[:TEXT]]


@dataclass(frozen=True)
class Part:
    """A part of a chat: the bytes of a content, the id of a file of `whose`, or a name alone."""

    form: Literal["inline", "file", "image_url", "alone"]
    content: int
    whose: str
    name: str | None

    def json(self) -> dict[str, Any]:
        """As a client sends it."""
        named = {} if self.name is None else {"uuid": self.name}
        match self.form:
            case "inline":
                return {"type": "image_url", "image_url": {"url": URLS[self.content]}, **named}
            case "alone":
                return {"type": "image_url", "image_url": None, **named}
            case form:
                return {"type": form, form: {"file_id": public_id(IDS[self.whose, self.content])}, **named}


@dataclass(frozen=True)
class Chat:
    tenant: Tenant
    parts: tuple[Part, ...]
    returns_ids: bool


@dataclass(frozen=True)
class Upload:
    tenant: Tenant
    content: int
    ttl_s: int | None


@dataclass(frozen=True)
class Look:
    """Retrieve a file, or read it."""

    tenant: Tenant
    content: int
    whose: str
    reads: bool


@dataclass(frozen=True)
class Delete:
    tenant: Tenant
    content: int
    whose: str


@dataclass(frozen=True)
class Breaking:
    """The store fails in the middle, after so many calls, and the frontend starts again."""

    step: Upload | Delete
    calls: int


@dataclass(frozen=True)
class List:
    tenant: Tenant


@dataclass(frozen=True)
class Wait:
    by_s: float


@dataclass(frozen=True)
class Sweep:
    """What has expired is deleted, as it is every second."""


@dataclass(frozen=True)
class Restart:
    """The frontend starts again, and has forgotten all names."""


@dataclass(frozen=True)
class Fault:
    """The store is "gone" or "full" from now on, or "" well."""

    kind: str


@dataclass(frozen=True)
class Forget:
    """The worker has a content no more."""

    content: int


Request = Chat | Upload | Look | Delete | List
Step = Request | Breaking | Wait | Sweep | Restart | Fault | Forget


@dataclass(frozen=True)
class Outcome:
    """What a request was answered with."""

    status: int = 200
    code: str = ""
    places: frozenset[int] = frozenset()
    """The parts that may be blamed: of several that nobody has, any."""

    contents: tuple[int, ...] = ()
    """The contents of a chat's items, in order."""

    sent: frozenset[int] = frozenset()
    """Those whose features the worker gets."""

    ids: tuple[int, ...] | None = None
    """The contents whose ids are returned, if they are wanted."""

    def allows(self, seen: Outcome) -> bool:
        """Whether it can be what was seen."""
        blamed = not self.places or (len(seen.places) == 1 and seen.places <= self.places)
        mine = self.status, self.code, self.contents, self.sent, self.ids
        return blamed and mine == (seen.status, seen.code, seen.contents, seen.sent, seen.ids)


def refused(status: int, *places: int) -> Outcome:
    codes = {400: "invalid_request", 404: "unknown_media", 409: "ambiguous_media", 413: "media_too_large"}
    return Outcome(status, codes.get(status, "media_store_unavailable"), frozenset(places))


@dataclass
class Model:
    """What a frontend and its worker have, by the numbers of the contents."""

    now_s: float
    fault: str = ""
    is_ready: bool = True
    files: dict[tuple[str, int], float] = field(default_factory=dict)
    """By tenant and content: when it expires."""

    sent: set[tuple[str, int]] = field(default_factory=set)
    """What the tenant has sent inline, and the frontend remembers."""

    names: dict[tuple[Tenant, str], set[int]] = field(default_factory=dict)
    items: set[tuple[Tenant, int]] = field(default_factory=set)
    """The contents whose digests the frontend remembers."""

    at_worker: set[tuple[Tenant, int]] = field(default_factory=set)

    @property
    def is_down(self) -> bool:
        return self.fault == "gone" or not self.is_ready

    def live(self) -> dict[tuple[str, int], float]:
        return {file: expires_s for file, expires_s in self.files.items() if expires_s > self.now_s}

    def restart(self) -> None:
        self.sent, self.names, self.items = set(), {}, set()
        self.is_ready = self.fault != "gone"

    def upload(self, step: Upload) -> Outcome:
        if self.is_down:
            return refused(503)
        if step.content == HUGE:
            return refused(413)
        if self.fault == "full":
            return refused(503)
        file = step.tenant.name, step.content
        expires_s = int(self.now_s) + min(step.ttl_s or TTL_S, TTL_S)
        self.files[file] = max(expires_s, self.live().get(file, 0))
        return Outcome()

    def look(self, step: Look) -> Outcome:
        if self.is_down:
            return refused(503)
        if step.whose != step.tenant.name or (step.whose, step.content) not in self.live():
            return refused(404)
        return Outcome(contents=(step.content,) if step.reads else ())

    def delete(self, step: Delete) -> Outcome:
        if (outcome := self.look(Look(step.tenant, step.content, step.whose, reads=False))).status == 200:
            del self.files[step.whose, step.content]
        return outcome

    def list(self, step: List) -> Outcome:
        if not self.is_ready:
            return refused(503)
        return Outcome(contents=tuple(sorted(one for name, one in self.live() if name == step.tenant.name)))

    def chat(self, step: Chat) -> Outcome:
        tenant, parts = step.tenant, dict(enumerate(step.parts))
        files = {place: part for place, part in parts.items() if part.form in ("file", "image_url")}
        own = {place: (tenant.name, part.content) for place, part in files.items() if part.whose == tenant.name}
        remembered = {place for place, file in own.items() if file in self.sent}
        stored = {place for place, file in own.items() if self.is_ready and file in self.live()}
        known = remembered | stored
        if self.is_down and files.keys() - known:
            return refused(503)
        for place, part in files.items():
            if place not in known:
                return refused(404, place)
            if part.content == TEXT:
                return refused(400, place)
        meant = dict[int, int]()
        for place, part in parts.items():
            bound = self.names.get((tenant, part.name or ""), set()) if part.form == "alone" else {part.content}
            if len(bound) != 1:
                return refused(409 if bound else 404, place)
            (meant[place],) = bound
        return self._use(step, meant)

    def _use(self, step: Chat, meant: Mapping[int, int]) -> Outcome:
        """Every part means a content: whether its bytes are needed, and where they are."""
        tenant, parts = step.tenant, dict(enumerate(step.parts))
        references = {place: content for place, content in meant.items() if parts[place].form != "inline"}
        unread = {p: content for p, content in references.items() if (tenant, content) not in self.items}
        if (outcome := self._read(tenant, unread)) is not None:
            return outcome
        with_bytes = {*unread.values(), *(meant[place] for place in meant.keys() - references.keys())}
        ids = list[int]()
        for place, content in meant.items():
            part = parts[place]
            if part.form != "inline" or part.name is not None or step.returns_ids:
                if part.form == "inline":
                    self.sent.add((tenant.name, content))
                if part.name is not None:
                    self.names.setdefault((tenant, part.name), set()).add(content)
                self.items.add((tenant, content))
                ids.append(content)
        needed = {content for content in meant.values() if (tenant, content) not in self.at_worker}
        missing = {place: content for place, content in references.items() if content in needed - with_bytes}
        if (outcome := self._read(tenant, missing)) is not None:
            return outcome
        self.at_worker |= {(tenant, content) for content in needed}
        wanted = tuple(ids) if step.returns_ids else None
        return Outcome(contents=tuple(meant.values()), sent=frozenset(needed), ids=wanted)

    def _read(self, tenant: Tenant, contents: Mapping[int, int]) -> Outcome | None:
        if contents and self.is_down:
            return refused(503)
        live = self.live()
        if missing := [place for place, content in contents.items() if (tenant.name, content) not in live]:
            return refused(404, *missing)
        return None

    def see(self, objects: Mapping[tuple[str, int], StoredFile], room_for: tuple[str, int] | None = None) -> None:
        """What is in the store after room was made for a file: files may be gone, but only as they may."""
        seen = {file for file, stored in objects.items() if stored.expires_s > self.now_s}
        gone = self.live().keys() - seen
        assert seen <= self.live().keys(), "nothing comes by itself"
        if gone:
            self._check_gone(gone, room_for)
        for file in gone:
            del self.files[file]
        for file in seen:
            assert objects[file].expires_s == self.files[file]

    def _check_gone(self, gone: set[tuple[str, int]], room_for: tuple[str, int] | None) -> None:
        """Files go for want of room, no more than have to, and first those of whoever has too much."""
        charges = {file: charged_bytes(len(CONTENTS[file[1]])) for file in self.live()}
        new = 0 if room_for is None else charged_bytes(len(CONTENTS[room_for[1]]))
        stays = sum(charge for file, charge in charges.items() if file not in gone)  # also what is being replaced
        assert stays + new + max(charges[file] for file in gone) > CAPACITY, "files are gone though there was room"
        names = {name for name, _ in charges} | ({room_for[0]} if room_for else set())
        for name, _ in gone:
            if room_for is None or name != room_for[0]:
                has = sum(charge for (owner, _), charge in charges.items() if owner == name)
                assert has > CAPACITY // len(names), "a tenant has lost a file of its share"


class World:
    """The shipped media store, sources and pipeline, with a worker that holds what it gets; and the model of them."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self.clock, self.objects = Clock(), FaultyObjects(BucketObjects(MemoryStore(), STORE_TIMEOUT_S))
        self.model = Model(self.clock.now_s)
        self.pipeline = Pipeline(renderer.tokenizer, renderer, self._process, "drawn", KEY)
        self.at_worker: dict[Digest, FeatureInfo] = {}
        self.digests = {
            (tenant, number): Identity(
                key=KEY, modality="image", fingerprint="drawn", options={}, tenant=tenant
            ).digest(content)
            for tenant in TENANTS
            for number, content in enumerate(CONTENTS[:TEXT])
        }

    async def live(self, steps: list[Step]) -> None:
        """Do all steps, and compare. Nobody waits for a store that is gone to be listed."""
        with patch("semel.store.store._FIRST_LISTING_S", 0.0):
            await self._start()
            for step in steps:
                await self._do(step)
            self.model.see(await self._stored())

    async def _do(self, step: Step) -> None:
        match step:
            case Wait(by_s):
                self.clock.now_s += by_s
                self.model.now_s = self.clock.now_s
            case Sweep():
                await self.store.expire()
            case Restart():
                await self._start()
                self.model.restart()
                self.model.see(await self._stored())
            case Fault(kind):
                await self._suffer(kind)
            case Forget(content):
                for tenant in TENANTS:
                    self.at_worker.pop(self.digests[tenant, content], None)
                    self.model.at_worker.discard((tenant, content))
            case Breaking(broken, calls):
                await self._break(broken, calls)
            case _:
                await self._compare(step)

    async def _compare(self, step: Request) -> None:
        seen, expected = await self._outcome(step), self._expected(step)
        assert expected.allows(seen), (step, expected, seen)
        if isinstance(step, Upload | Delete):
            self.model.see(await self._stored(), _room_for(step))

    def _expected(self, step: Request) -> Outcome:
        match step:
            case Chat():
                return self.model.chat(step)
            case Upload():
                return self.model.upload(step)
            case Look():
                return self.model.look(step)
            case Delete():
                return self.model.delete(step)
            case List():
                return self.model.list(step)

    async def _start(self) -> None:
        self.store = MediaStore(self.objects, key=KEY, capacity_bytes=CAPACITY, ttl_s=TTL_S, clock=self.clock)
        parts = self.pipeline.tokenizer, self.pipeline.chat_renderer, self._process
        self.pipeline = Pipeline(*parts, "drawn", KEY, files=FileSources(self.store))
        if self.objects.fault != "gone":
            await self.store.refresh()

    async def _suffer(self, fault: str) -> None:
        """A store that is back is listed, if it could not be before."""
        self.objects.fault = self.model.fault = fault
        if fault != "gone" and not self.model.is_ready:
            await self.store.refresh()
            self.model.is_ready = True
            self.model.see(await self._stored())

    async def _break(self, step: Upload | Delete, calls: int) -> None:
        """What was cut off is there or not; what else there is has to be there still."""
        file = step.tenant.name, step.content
        before = self.model.live().get(file)
        self.objects.breaks_after = calls
        seen = await self._outcome(step)
        self.objects.breaks_after = None
        expected = self._expected(step)
        await self._start()
        self.model.restart()
        stored = await self._stored()
        assert seen == refused(503) or expected.allows(seen), (step, expected, seen)
        if seen.status == 503 and expected.status == 200:
            self.model.files.pop(file, None)
            if file in stored and stored[file].expires_s > self.model.now_s:
                self.model.files[file] = stored[file].expires_s
            elif before is not None and isinstance(step, Upload):
                self.model.files[file] = before  # gone only to make room
        self.model.see(stored, _room_for(step))

    async def _outcome(self, step: Request) -> Outcome:
        try:
            return await self._ask(step)
        except (RequestError, ServiceError) as error:
            param = error.param if isinstance(error, RequestError) else None
            places = {int(param.rpartition("[")[2][:-1])} if param and param.startswith("messages") else set()
            return Outcome(error.status, error.code, frozenset(places))

    async def _ask(self, step: Request) -> Outcome:
        match step:
            case Upload(tenant, content, ttl_s):
                file = await self.store.put(tenant.name, upload_of(CONTENTS[content], ttl_s=ttl_s))
                assert FILES[file.id] == (tenant.name, content)
                return Outcome()
            case Look(tenant, content, whose, reads):
                return await self._look(tenant.name, IDS[whose, content], reads=reads)
            case Delete(tenant, content, whose):
                return Outcome() if await self.store.delete(tenant.name, IDS[whose, content]) else refused(404)
            case List(tenant):
                page = await self.store.page(tenant.name, limit=100)
                assert page is not None
                assert {FILES[file.id][0] for file in page.files} <= {tenant.name}
                return Outcome(contents=tuple(sorted(FILES[file.id][1] for file in page.files)))
            case Chat():
                return await self._chat(step)

    async def _look(self, tenant: str, digest: Digest, *, reads: bool) -> Outcome:
        if not reads:
            return refused(404) if await self.store.find(tenant, digest) is None else Outcome()
        found = await self.store.read(tenant, digest, lambda _: None)
        return refused(404) if found is None else Outcome(contents=(NUMBERS[bytes(found[1])],))

    async def _chat(self, step: Chat) -> Outcome:
        content = [*(part.json() for part in step.parts), {"type": "text", "text": "?"}]
        request = ChatRequest([{"role": "user", "content": content}], return_media_ids=step.returns_ids)
        draft = await self.pipeline.read_chat(request, step.tenant)
        rendered = await self.pipeline.render(draft, self.at_worker.get)
        numbers = {digest: number for (tenant, number), digest in self.digests.items() if tenant == step.tenant}

        def number_of(item: Item) -> int:
            return numbers.get(item.digest, -1)

        assert rendered.prompt.items == draft.items
        for digest, feature in rendered.features.items():
            assert feature == _feature(numbers[digest]), "a feature is of another content"
            self.at_worker[digest] = FeatureInfo.of(feature)
        ids = tuple(FILES[one][1] for one in draft.contents) if step.returns_ids else None
        assert {FILES[one][0] for one in draft.contents} <= {step.tenant.name}
        sent = frozenset(numbers[digest] for digest in rendered.features)
        return Outcome(contents=tuple(map(number_of, draft.items)), sent=sent, ids=ids)

    async def _process(self, media: Media, options: Mapping[str, object], **_: object) -> Feature:
        del options
        return _feature(NUMBERS[media.data])

    async def _stored(self) -> dict[tuple[str, int], StoredFile]:
        """What is among the objects, whatever the store says."""
        found: dict[Digest, list[StoredFile]] = {}
        async for page in self.objects.objects.list("media-1"):
            for path, nbytes in page:
                if (file := parse_object_path(path, nbytes)) is not None:
                    assert OWNERS[file.owner] == FILES[file.id][0]
                    found.setdefault(file.id, []).append(file)
        return {FILES[one]: file for one, files in found.items() if (file := newest(files, -1.0)) is not None}


def _room_for(step: Upload | Delete) -> tuple[str, int] | None:
    """The file that room is made for."""
    return (step.tenant.name, step.content) if isinstance(step, Upload) and step.content != HUGE else None


def _feature(number: int) -> Feature:
    return drawn(Media("image", str(number).encode()))
