"""Names that frontends share, in random interleavings of what they do at one store, next to a slow model.

Each operation of the store waits for its turn, so that any other may come between any two. The model is the history
of a name: who sent what under it and when, and what it meant to whom. Every rule is checked by looking at all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from semel.core import Digest, FeatureInfo, Identity, Tenant
from semel.errors import AmbiguousMedia, MediaStoreUnavailable, UnknownMedia
from semel.render import ChatRenderer, ChatRequest, Pipeline
from semel.render.file_sources import FileSources
from semel.render.media import shared_names
from semel.render.media.names import MediaNames
from semel.render.media.shared_names import CONFIRM_S, SharedNames
from semel.store import bindings as bindings_module
from semel.store.bindings import BucketBindings
from semel.store.objects import OnEnd
from semel.store.upload import FRONTEND, Payer
from tests.effort import examples
from tests.render.conftest import folder, parts_renderer
from tests.render.drawn import drawn, image_part
from tests.store.stores import KEY, Clock, PlainObjects, bindings_over

__all__ = ["folder", "parts_renderer"]

FRONTENDS: Final = 2
TENANTS: Final = (Tenant("acme"), Tenant("acme", "salt"), Tenant("umbra"))
CONTENTS: Final = 3
PHASES: Final = (Phase.generate,)
"""Set `Phase.shrink` too to see a short life."""

PERIOD_S: Final = 10_000
"""In which the store uses one place for a name."""


@dataclass(frozen=True)
class Send:
    """A chat with the bytes of a content, and a name."""

    frontend: int
    tenant: Tenant
    name: str
    content: int


@dataclass(frozen=True)
class Use:
    """A chat with a name alone."""

    frontend: int
    tenant: Tenant
    name: str


@dataclass(frozen=True)
class Go:
    """One of the waiting operations of the store is done."""

    number: int


@dataclass(frozen=True)
class Wait:
    by_s: float


@dataclass(frozen=True)
class Fault:
    frontend: int
    kind: str


@dataclass(frozen=True)
class Restart:
    frontend: int


Step = Send | Use | Go | Wait | Fault | Restart
_WHERE: Final = st.integers(0, FRONTENDS - 1)
_NAMED: Final = _WHERE, st.sampled_from(TENANTS), st.sampled_from(["one", "one", "one", "two"])
_GO: Final = st.builds(Go, st.integers(0, 5))
SOUND: Final[st.SearchStrategy[Step]] = st.one_of(
    st.builds(Send, *_NAMED, st.integers(0, CONTENTS - 1)),
    st.builds(Use, *_NAMED),
    _GO,
    _GO,
    st.builds(Wait, st.sampled_from([1.0, CONFIRM_S + 1, PERIOD_S / 2])),
)
ANY: Final = st.one_of(
    SOUND, st.builds(Fault, _WHERE, st.sampled_from(["", "", "down", "lost"])), st.builds(Restart, _WHERE)
)


class Turns:
    """Operations of stores that wait for their turn."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[None]] = []
        self.is_open = True

    async def take(self) -> None:
        if not self.is_open:
            self.waiting.append(turn := asyncio.get_running_loop().create_future())
            await turn

    async def give(self, number: int) -> None:
        """Let one operation go on, as far as it comes."""
        if self.waiting:
            turn = self.waiting.pop(number % len(self.waiting))
            if not turn.done():
                turn.set_result(None)
        await settle()


async def settle() -> None:
    for _ in range(60):
        await asyncio.sleep(0)


class Objects(PlainObjects):
    """A frontend's way to the one bucket."""

    def __init__(self, bucket: dict[str, bytes], turns: Turns) -> None:
        self.objects, self.turns, self.fault = bucket, turns, ""

    async def _begin(self) -> None:
        await self.turns.take()
        if self.fault == "down":
            raise MediaStoreUnavailable("down")

    def _end(self) -> None:
        if self.fault:  # it was done, and nobody hears of it
            raise MediaStoreUnavailable("lost")

    async def put(
        self, path: str, data: bytes | bytearray, on_end: OnEnd = lambda _: None, *, payer: Payer = FRONTEND
    ) -> None:
        await self._begin()
        await super().put(path, data, on_end, payer=payer)
        self._end()

    async def create(self, path: str, data: bytes, *, payer: Payer = FRONTEND) -> bool:
        await self._begin()
        if is_new := path not in self.objects:
            await PlainObjects.put(self, path, data, payer=payer)
        self._end()
        return is_new

    async def get(self, path: str, nbytes: int, *, start: int = 0, payer: Payer = FRONTEND) -> memoryview | None:
        await self._begin()
        found = await super().get(path, nbytes, start=start, payer=payer)
        self._end()
        return found


@dataclass
class Event:
    """A request with a name: with the bytes of a content, or alone."""

    frontend: int
    begun: int
    clock_s: float
    sends: int | None = None
    ended: int | None = None
    ended_s: float = 0.0
    meant: int | None = None
    """What a name alone was answered with: a content, or the status of a refusal."""


@dataclass
class World:
    """Frontends, their store, and the history of each name."""

    renderer: ChatRenderer
    clock: Clock = field(default_factory=Clock)
    turns: Turns = field(default_factory=Turns)
    bucket: dict[str, bytes] = field(default_factory=dict)
    objects: list[Objects] = field(default_factory=list)
    pipelines: list[Pipeline] = field(default_factory=list)
    at_worker: dict[Digest, FeatureInfo] = field(default_factory=dict)
    history: dict[tuple[Tenant, str], list[Event]] = field(default_factory=dict)
    running: set[asyncio.Task[None]] = field(default_factory=set)
    now: int = 0
    sound_since: int = 0
    """After the last fault and the last restart."""

    was_unsound: bool = False

    async def start(self, number: int) -> None:
        """Start a frontend, in place of the previous one."""
        objects = Objects(self.bucket, self.turns)
        self.turns.is_open = True
        bindings = await bindings_over(objects, self.clock)
        self.turns.is_open = False
        names = MediaNames()
        files = FileSources(None, names, SharedNames(bindings, names, self.clock))
        tokenizer = self.renderer.tokenizer
        pipeline = Pipeline(tokenizer, self.renderer, self._process, "drawn", KEY, files=files)
        self.objects[number:] = [objects, *self.objects[number + 1 :]]
        self.pipelines[number:] = [pipeline, *self.pipelines[number + 1 :]]

    async def live(self, steps: Sequence[Step]) -> None:
        """Take all steps, let everything end, use each name at each frontend twice, and check."""
        for number in range(FRONTENDS):
            await self.start(number)
        for step in steps:
            self.now += 1
            await self._take(step)
        await self.drain()
        for objects in self.objects:
            objects.fault = ""
        if self.was_unsound:
            self._note_unsound()
        for _ in range(2):
            for number in range(FRONTENDS):
                for tenant, name in list(self.history):
                    await self.begin(number, tenant, name)
                    await self.drain()
            self.clock.now_s += CONFIRM_S + 1
        self.check()

    async def _take(self, step: Step) -> None:
        match step:
            case Send(number, tenant, name, content):
                await self.begin(number, tenant, name, content)
            case Use(number, tenant, name):
                await self.begin(number, tenant, name)
            case Go(number):
                await self.turns.give(number)
            case Wait(by_s):
                self.clock.now_s += by_s
            case Fault(number, kind):
                self.objects[number].fault = kind
                self._note_unsound()
            case Restart(number):
                await self.start(number)
                self._note_unsound()

    def _note_unsound(self) -> None:
        self.was_unsound, self.sound_since = True, self.now + 1

    async def drain(self) -> None:
        await settle()
        while self.running:
            await self.turns.give(0)

    async def begin(self, number: int, tenant: Tenant, name: str, sends: int | None = None) -> None:
        self.now += 1
        event = Event(number, self.now, self.clock.now_s, sends)
        self.history.setdefault((tenant, name), []).append(event)
        self.running.add(task := asyncio.create_task(self._request(self.pipelines[number], tenant, name, event)))
        task.add_done_callback(self.running.discard)
        await settle()

    async def _request(self, pipeline: Pipeline, tenant: Tenant, name: str, event: Event) -> None:
        alone = {"type": "image_url", "image_url": None}
        part = {**(alone if event.sends is None else image_part(event.sends)), "uuid": name}
        request = ChatRequest([{"role": "user", "content": [part, {"type": "text", "text": "?"}]}])
        try:
            parsed = await pipeline.read_chat(request, tenant)
            rendered = await pipeline.render(parsed, self.at_worker.get)
            self.at_worker |= {digest: FeatureInfo.of(feature) for digest, feature in rendered.features.items()}
            (meant,) = [content for content in range(CONTENTS) if _digest(tenant, content) == parsed.items[0].digest]
        except UnknownMedia:
            meant = 404
        except AmbiguousMedia:
            meant = 409
        assert event.sends in (None, meant), "bytes win"
        self.now += 1
        event.ended, event.ended_s, event.meant = self.now, self.clock.now_s, meant

    async def _process(self, media: Any, options: object, **_: object) -> Any:
        del options
        return drawn(media)

    def check(self) -> None:
        """Look at all that happened to each name."""
        for named, events in self.history.items():
            sends = [event for event in events if event.sends is not None]
            uses = [event for event in events if event.sends is None]
            for use in uses:
                self._check_use(use, sends)
            sound = {use.meant for use in uses if use.begun >= self.sound_since} - {404, 409}
            assert len(sound) <= 1, (named, "it has changed its content", events)

    def _check_use(self, use: Event, sends: Iterable[Event]) -> None:
        before = [send for send in sends if send.begun < (use.ended or 0)]
        done = [send for send in sends if (send.ended or use.begun) < use.begun]
        here = {send.sends for send in done if send.frontend == use.frontend}
        if use.meant == 404:
            assert not done or self.was_unsound, ("it was sent before", use)
        elif use.meant == 409:
            assert len({send.sends for send in before}) > 1, ("it was sent with one content", use)
        else:
            assert use.meant in {send.sends for send in before}, ("it was never sent with that", use)
            if not self.was_unsound:
                assert len(here) < 2, ("it is ambiguous here", use)
                known = {send.sends for send in done if send.ended_s + CONFIRM_S < use.clock_s}
                assert len(known) < 2, ("it has been ambiguous for a minute", use)


def _digest(tenant: Tenant, content: int) -> Digest:
    identity = Identity(key=KEY, modality="image", fingerprint="drawn", options={}, tenant=tenant)
    return identity.digest(str(content).encode())


async def _live(renderer: ChatRenderer, steps: Sequence[Step]) -> None:
    async with asyncio.timeout(60):
        await World(renderer).live(steps)


def search(renderer: ChatRenderer, steps: st.SearchStrategy[Step], count: int) -> None:
    """Look for a life that breaks a rule."""

    @settings(max_examples=count, deadline=None, database=None, derandomize=True, phases=PHASES)
    @given(st.lists(steps, max_size=30))
    def lives(life: list[Step]) -> None:
        asyncio.run(_live(renderer, life))

    lives()


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_names, "_PAUSE_S", 0.0)


@pytest.mark.parametrize("steps", [SOUND, ANY], ids=["sound", "with faults and restarts"])
def test_in_any_interleaving_a_name_never_changes_its_content(
    parts_renderer: ChatRenderer, steps: st.SearchStrategy[Step]
) -> None:
    search(parts_renderer, steps, examples(200))


def ignoring_create(patch: pytest.MonkeyPatch) -> None:
    """A bucket that ignores `If-None-Match`, and is not found out."""

    async def create(self: Objects, path: str, data: bytes, *, payer: Payer = FRONTEND) -> bool:
        await self.put(path, data, payer=payer)
        return True

    async def prove(self: BucketBindings) -> None:
        self._creates = True

    patch.setattr(Objects, "create", create)
    patch.setattr(BucketBindings, "prove", prove)


def not_asking_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shared_names, "CONFIRM_S", 1e9)


def last_content_wins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bindings_module, "_merged", lambda stored, ours: ours or stored)


def first_content_wins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bindings_module, "_merged", lambda stored, ours: stored or ours)


def believing_itself(patch: pytest.MonkeyPatch) -> None:
    """A name that was just sent is used before the store has it."""
    is_current = SharedNames.is_current

    def mutant(self: SharedNames, tenant: Tenant, name: str) -> bool:
        return is_current(self, tenant, name) or self._memory.bound(tenant, name) is not None

    patch.setattr(SharedNames, "is_current", mutant)


def not_waiting(patch: pytest.MonkeyPatch) -> None:
    """An answer ends before its names are in the store."""
    patch.setattr(shared_names, "_TIMEOUT_S", 0.0)


def sharing_with_all_tenants(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bindings_module, "owner_name", lambda *_: "-" * 49)


def forgetting_the_previous_period(patch: pytest.MonkeyPatch) -> None:
    place = BucketBindings._place

    def mutant(self: BucketBindings, owner: str, name: bytes, period: int) -> Any:
        return place(self, owner, name, -1 if period < int(self._clock()) // self._ttl_s else period)

    patch.setattr(BucketBindings, "_place", mutant)


@pytest.mark.parametrize(
    "mutate",
    [
        pytest.param(ignoring_create, marks=pytest.mark.slow),
        not_asking_again,
        last_content_wins,
        first_content_wins,
        believing_itself,
        not_waiting,
        sharing_with_all_tenants,
        pytest.param(forgetting_the_previous_period, marks=pytest.mark.slow),
    ],
)
def test_a_mutant_is_found(
    parts_renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None]
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        search(parts_renderer, SOUND, 1_000)


async def meant(world: World, frontend: int, sends: int | None = None) -> int | None:
    """What a name means at a frontend, while the store does all that it is asked for."""
    await world.begin(frontend, TENANTS[0], "one", sends)
    await world.drain()
    return world.history[TENANTS[0], "one"][-1].meant


async def test_a_store_that_hangs_delays_an_answer_once_and_gets_the_name_when_it_is_used_again(
    parts_renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_names, "_TIMEOUT_S", 0.05)
    monkeypatch.setattr(shared_names, "_PAUSE_S", 3_600.0)
    world = World(parts_renderer)
    for number in range(FRONTENDS):
        await world.start(number)
    for sends in (1, None, None):
        await world.begin(0, TENANTS[0], "one", sends)
        async with asyncio.timeout(10):
            await asyncio.gather(*world.running)  # nobody gives the store its turn
    assert [event.meant for event in world.history[TENANTS[0], "one"]] == [1, 1, 1]
    assert len(world.turns.waiting) == 1, "it was left alone since"
    shared = world.pipelines[0].files.shared
    assert shared is not None
    assert {value for metric, value, _ in shared.samples() if "unshared" in metric.name} == {
        3 + 2
    }  # looked for, written
    monkeypatch.setattr(shared_names, "_TIMEOUT_S", 60.0)
    for pipeline in world.pipelines:
        assert pipeline.files.shared is not None
        pipeline.files.shared._breaker._timeout_s = 60.0
    assert await meant(world, 1) == 404
    shared._breaker._open_until_s.clear()
    assert [await meant(world, 0), await meant(world, 1)] == [1, 1]


async def test_names_that_wait_for_the_store_are_bounded_and_those_left_out_are_written_when_they_are_used_again_S21(
    parts_renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_names, "_MAX_WAITING", 3)
    world = World(parts_renderer)
    for number in range(FRONTENDS):
        await world.start(number)
    shared = world.pipelines[0].files.shared
    assert shared is not None
    for number in range(5):
        await world.begin(0, TENANTS[0], f"name {number}", 1)
    await settle()
    assert (len(shared._writing), shared._waiting) == (3, {"acme": 3})
    assert {value for metric, value, _ in shared.samples() if "unshared" in metric.name} == {2}
    await world.drain()
    assert (len(shared._writing), shared._waiting) == (0, {"acme": 0})
    assert len(world.bucket) == 3 + 1  # and the probe
    for number in range(5):
        await world.begin(0, TENANTS[0], f"name {number}")
        await world.drain()
    assert len(world.bucket) == 5 + 1


async def test_what_the_store_has_lost_is_written_again_by_who_uses_it(parts_renderer: ChatRenderer) -> None:
    world = World(parts_renderer)
    for number in range(FRONTENDS):
        await world.start(number)
    assert await meant(world, 0, sends=1) == 1
    world.bucket.clear()
    assert [await meant(world, 0), await meant(world, 1)] == [1, 404]
    world.clock.now_s += CONFIRM_S + 1
    assert [await meant(world, 0), await meant(world, 1)] == [1, 1]
