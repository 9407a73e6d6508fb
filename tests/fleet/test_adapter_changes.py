"""An adapter that an operator loads at one worker is loaded at all, through their frontends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from semel.core import AdapterChange, Digest, Feature, LatestChanges, Submission
from semel.errors import NotReady
from semel.fleet.fleet import Fleet
from semel.wire.messages import ChangeAdapter
from tests.waiting import until
from tests.wire.examples import CONTRACT
from tests.worker.adapting import AdaptingEngine
from tests.worker.pairing import Rig, expected, feature, prompt, rig

FRONTENDS = 2


@dataclass
class Workers:
    """Workers and two frontends of all of them."""

    folder: Path
    stack: AsyncExitStack
    rigs: list[Rig] = field(default_factory=list)
    fleets: list[Fleet] = field(default_factory=lambda: [Fleet() for _ in range(FRONTENDS)])

    async def start(self, name: str, *, takes_adapters: bool = True) -> AdaptingEngine:
        (self.folder / name).mkdir(mode=0o700)
        engine = AdaptingEngine(CONTRACT) if takes_adapters else None
        made = await self.stack.enter_async_context(rig(self.folder / name, frontends=FRONTENDS, engine=engine))
        self.rigs.append(made)
        for fleet, frontend in zip(self.fleets, made.frontends, strict=True):
            fleet.add(frontend.worker)
        return cast("AdaptingEngine", made.engine)

    def leave(self, number: int) -> None:
        """The worker is gone for good."""
        for fleet, frontend in zip(self.fleets, self.rigs[number].frontends, strict=True):
            fleet.remove(frontend.worker)

    def able(self, name: str) -> list[list[int]]:
        """For each frontend, the workers that answer for an adapter."""
        return [
            [
                number
                for number, one in enumerate(self.rigs)
                if one.frontends[index].worker in fleet._numbers
                and fleet._able(name) >> fleet._numbers[one.frontends[index].worker] & 1
            ]
            for index, fleet in enumerate(self.fleets)
        ]


@pytest.fixture
async def workers(tmp_path: Path) -> AsyncIterator[Workers]:
    async with AsyncExitStack() as stack:
        yield Workers(tmp_path, stack)


async def test_what_one_worker_was_asked_for_all_do_and_those_that_come_later(workers: Workers) -> None:
    engines = [await workers.start(name) for name in "abc"]
    await workers.start("none", takes_adapters=False)
    await engines[1].load("law", "/law-1")
    await until(lambda: workers.able("law") == [[0, 1, 2]] * FRONTENDS)
    assert {one.contents["law"] for one in engines} == {"of /law-1"}
    assert all(fleet.adapters["law"].root == "/law-1" for fleet in workers.fleets)
    late = await workers.start("d")
    await until(lambda: workers.able("law") == [[0, 1, 2, 4]] * FRONTENDS)
    await late.unload("law")
    await until(lambda: all("law" not in one.contents for one in (*engines, late)))
    await until(lambda: workers.able("law") == [[]] * FRONTENDS)
    assert all("law" not in fleet.adapters for fleet in workers.fleets), "unknown, which is 404"


async def test_a_worker_with_the_weights_of_before_answers_no_more_as_soon_as_a_frontend_knows(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    """And it is asked once, by whom ever: what it cannot load, it cannot load. The wrong implementation, without the
    worker's own note of what it has tried, was asked by each frontend."""
    caplog.set_level(logging.WARNING)
    engines = [await workers.start(name) for name in "ab"]
    assert workers.able("sql") == [[0, 1]] * FRONTENDS
    engines[1].lacks.add("/sql-2")
    await engines[0].load("sql", "/sql-2", in_place=True)
    await until(lambda: workers.able("sql") == [[0]] * FRONTENDS)
    await until(lambda: bool(engines[1].followed))
    await engines[0].load("law", "/law")
    await until(lambda: workers.able("law") == [[0, 1]] * FRONTENDS)
    assert [one.root for one in engines[1].followed] == ["/sql-2", "/law"]
    assert caplog.text.count("there is no folder /sql-2") == 1
    engines[1].lacks.clear()
    await engines[0].load("sql", "/sql-2", in_place=True)
    await until(lambda: workers.able("sql") == [[0, 1]] * FRONTENDS)


async def test_an_only_worker_that_starts_again_has_its_adapters_again(workers: Workers) -> None:
    """Frontends remember them. Until it has them the adapter is no unknown name."""
    first = await workers.start("a")
    await first.load("law", "/law")
    await until(lambda: workers.able("law") == [[0]] * FRONTENDS)
    workers.leave(0)
    assert all("law" not in fleet.adapters for fleet in workers.fleets)
    second = await workers.start("b")
    await until(lambda: workers.able("law") == [[1]] * FRONTENDS)
    assert second.contents["law"] == "of /law"
    workers.leave(1)
    third = AdaptingEngine(CONTRACT)
    third.lacks.add("/law")
    (workers.folder / "c").mkdir(mode=0o700)
    made = await workers.stack.enter_async_context(rig(workers.folder / "c", frontends=FRONTENDS, engine=third))
    workers.fleets[0].add(made.frontends[0].worker)
    await until(lambda: bool(third.followed))
    assert "law" in workers.fleets[0].adapters
    with pytest.raises(NotReady, match="no worker has the adapter"):
        workers.fleets[0].choose((), adapter="law")


async def test_a_worker_without_adapters_ends_the_session_of_who_sends_it_a_change(workers: Workers) -> None:
    await workers.start("a", takes_adapters=False)
    (made,) = workers.rigs
    remote = made.frontends[0].worker
    assert remote._session is not None
    remote._session.send(ChangeAdapter(AdapterChange("law", 1, "/law", "1")))
    await until(lambda: remote.sessions == 2)


async def test_an_operator_is_later_than_whoever_has_a_clock_that_is_fast(workers: Workers) -> None:
    engines = [await workers.start(name) for name in "ab"]
    ahead_us = time.time_ns() // 1_000 + 600_000_000
    engines[0]._put(AdapterChange("law", ahead_us, "/law-1", "of /law-1"))
    await until(lambda: workers.able("law") == [[0, 1]] * FRONTENDS)
    await engines[1].load("law", "/law-2", in_place=True)
    await until(lambda: engines[0].contents["law"] == "of /law-2")


def test_of_two_changes_at_once_all_choose_the_same_one_and_old_ones_are_forgotten() -> None:
    one, two = (AdapterChange("law", 5, "/law", content) for content in "ab")
    for order in ((one, two), (two, one)):
        changes = LatestChanges()
        for change in order:
            changes.note(change)
        assert changes.get("law") == two
        assert not changes.note(AdapterChange("law", 4, "/law", "z"))


def test_full_ones_are_merged_in_any_order_to_the_same_and_nothing_old_is_new_again() -> None:
    """The wrong implementation forgot what had come first: two that were full told each other for ever."""
    made = [AdapterChange(f"a{number}", number) for number in range(1_500)]
    random = Random(1)
    merged = []
    for _ in range(3):
        changes = LatestChanges()
        for change in random.sample(made, len(made)):
            changes.note(change)
        assert not any(changes.note(change) for change in random.sample(made, len(made)))
        merged.append({change.name for change in changes})
    assert merged == [{change.name for change in made[-1_024:]}] * 3


async def test_a_change_of_next_year_ends_the_session(workers: Workers) -> None:
    """Else no operator could be later."""
    await workers.start("a")
    remote = workers.rigs[0].frontends[0].worker
    assert remote._session is not None
    remote._session.send(ChangeAdapter(AdapterChange("law", 1 << 62, "/law", "1")))
    await until(lambda: remote.sessions == 2)


async def test_a_session_that_ends_while_changes_are_passed_on_is_no_error_for_others(workers: Workers) -> None:
    engines = [await workers.start(name) for name in "ab"]
    ended = workers.rigs[1].frontends[0].worker._session
    assert ended is not None
    send = ended.send

    def overrun(message: Any) -> None:
        send(message)
        ended.reset("it reads nothing")

    ended.send = overrun  # type: ignore[method-assign]
    fleet = workers.fleets[0]
    for name in ("law", "bio"):
        engines[0].changes.note(AdapterChange(name, time.time_ns() // 1_000, f"/{name}", f"of /{name}"))
    await engines[0].load("art", "/art")
    await until(lambda: workers.able("art") == [[0, 1]] * FRONTENDS)
    assert fleet.adapters["art"].root == "/art"


async def test_a_request_that_was_prepared_for_the_weights_of_before_goes_to_who_has_those_of_now(
    workers: Workers,
) -> None:
    engines = [await workers.start(name) for name in "ab"]
    fleet = workers.fleets[0]
    old = fleet.choose((), adapter="sql")
    number = next(number for number, one in enumerate(workers.rigs) if one.frontends[0].worker is old)
    engines[number].lacks.add("/sql-2")
    await engines[1 - number].load("sql", "/sql-2", in_place=True)
    await until(lambda: workers.able("sql") == [[1 - number]] * FRONTENDS)
    submission = Submission("r", prompt([1]), {}, {}, adapter="sql")

    async def make(_: Digest) -> Feature:
        return feature(1)

    stream = await fleet.submit(old, submission, make)
    assert [token async for output in stream for token in output.token_ids] == list(expected([1]))
    await stream.close()
    assert [one.submissions for one in engines] == [number, 1 - number]


async def test_a_change_waits_for_the_one_before(workers: Workers) -> None:
    """Of several of one name that wait, the last one is done."""
    engine = await workers.start("a")
    follow, has_begun, may_go = engine.follow, asyncio.Event(), asyncio.Event()

    async def wait(change: AdapterChange) -> None:
        has_begun.set()
        await may_go.wait()
        await follow(change)

    engine.follow = wait  # type: ignore[method-assign]
    session = workers.rigs[0].frontends[0].worker._session
    changes = workers.rigs[0].worker._adapter_changes
    assert session is not None
    assert changes is not None
    for time_us, name in enumerate(("law", "bio", "bio", "law")):
        session.send(ChangeAdapter(AdapterChange(name, time_us, f"/{name}-{time_us}", "1")))
        await has_begun.wait()
    await until(lambda: len(changes._waiting) == 2 and changes._waiting["bio"].time_us == 2)
    may_go.set()
    await until(lambda: len(engine.followed) == 3)
    assert [one.root for one in engine.followed] == ["/law-0", "/bio-2", "/law-3"]
