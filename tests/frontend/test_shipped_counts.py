"""D8: what frontends count equals what an oracle does, under concurrency and with a reset inside of the load.

The oracle knows of every request, of when an item was made, and of every reset; it knows no cache and no ledger of
semel's. Items are made when the test lets them, so what is in flight at which moment is the test's choice.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from semel.compose import frontend as assembly
from semel.core import Modality
from semel.fleet.fleet import Fleet
from semel.render import Pipeline
from tests.effort import FACTOR
from tests.frontend.shipped import DrawnPool, Shipped, shipped
from tests.render.conftest import folder
from tests.render.drawn import chat
from tests.waiting import until

__all__ = ["folder"]

CHAT = "/v1/chat/completions"
NUMBERS = range(10)


@dataclass(eq=False)
class Request:
    """A request that is not answered yet."""

    frontend: int
    items: Counter[int]
    task: asyncio.Task[Any]
    waits_for: set[int]
    has: set[int] = field(default_factory=set)
    """Whose features are at hand."""

    lacking: list[int] = field(default_factory=list)
    """What a reset took away while it waited, and is made again, one after the other."""


@dataclass
class Oracle:
    """A fleet in which nothing is evicted. An item that is shown twice in one request is always shown twice."""

    frontends: int
    queries: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    cached: list[set[int]] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    open: list[Request] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cached = [set() for _ in range(self.frontends)]

    def in_flight(self, frontend: int) -> set[int]:
        return set[int]().union(*(one.waits_for for one in self.open if one.frontend == frontend))

    def begin(self, request: Request) -> None:
        cached = self.cached[request.frontend]
        for number, count in request.items.items():
            self.queries["processor"] += count
            if number in self.held or number in cached:
                self.hits["processor"] += count
                if number not in self.held:
                    request.has.add(number)
            else:
                request.waits_for.add(number)
        self.open.append(request)
        self._go_on(request)

    def made(self, frontend: int, number: int) -> None:
        self.cached[frontend].add(number)
        for request in [one for one in self.open if one.frontend == frontend and number in one.waits_for]:
            request.waits_for.discard(number)
            request.has.add(number)
            self._go_on(request)

    def reset(self) -> None:
        self.held.clear()
        for cached in self.cached:
            cached.clear()

    def end(self, request: Request) -> None:
        self.open.remove(request)
        self.ended.append(request)

    def _go_on(self, request: Request) -> None:
        """Submit it, once all that the worker lacks is at hand."""
        while not request.waits_for:
            if not request.lacking:
                request.lacking = [one for one in request.items if one not in self.held | request.has]
            if not request.lacking:
                self._submit(request)
                return
            number = request.lacking.pop(0)
            target = request.has if number in request.has | self.cached[request.frontend] else request.waits_for
            target.add(number)

    def _submit(self, request: Request) -> None:
        for number, count in request.items.items():
            self.queries["worker"] += count
            self.hits["worker"] += count * (number in self.held)
        self.held |= request.items.keys()
        self.end(request)


@dataclass
class Load:
    """One run: what is done, to the frontends and to the oracle."""

    oracle: Oracle
    rng: random.Random
    world: Shipped = field(init=False)
    forgotten: int = 0
    """How often a frontend has heard of a reset."""

    @contextmanager
    def hearing_of_resets(self) -> Iterator[None]:
        forget = assembly._Parts._forget

        def heard(parts: assembly._Parts) -> None:
            forget(parts)
            self.forgotten += 1

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(assembly._Parts, "_forget", heard)
            yield

    async def step(self) -> None:
        deed = self.rng.choices([self.ask, self.make, self.abort, self.reset], [6, 6, 1, 1])[0]
        await deed()
        await until(self.is_settled, within_s=5)

    async def close(self) -> None:
        """Cut off what is not answered, if a check has failed."""
        tasks = [request.task for request in (*self.oracle.open, *self.oracle.ended)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def ask(self) -> None:
        number = self.rng.randrange(len(self.world.frontends))
        shown = [one for one in self.rng.sample(NUMBERS, self.rng.randint(1, 3)) for _ in range(1 + one % 2)]
        self.rng.shuffle(shown)
        body = {"messages": list(chat(*shown).messages)}
        task = asyncio.create_task(self.world.frontends[number].client.post(CHAT, json=body))
        self.oracle.begin(Request(number, Counter(shown), task, set()))
        for _ in range(100):  # no thread and no socket on the way: so many turns take it to where it looks its items up
            await asyncio.sleep(0)

    async def make(self) -> None:
        waiting = [
            (index, one) for index, frontend in enumerate(self.world.frontends) for one in frontend.pool.in_flight
        ]
        if waiting:
            index, number = self.rng.choice(sorted(waiting))
            self.world.frontends[index].pool.in_flight[number].set()
            self.oracle.made(index, number)

    async def abort(self) -> None:
        if self.oracle.open:
            request = self.rng.choice(self.oracle.open)
            request.task.cancel()
            self.oracle.end(request)

    async def reset(self) -> None:
        before = self.forgotten
        await self.world.worker.reset()
        self.oracle.reset()
        await until(lambda: self.forgotten == before + len(self.world.frontends), within_s=5)

    def is_settled(self) -> bool:
        """Whether all that can happen has: what is in flight, cached, held and known is what the oracle says."""
        oracle, held = self.oracle, len(self.oracle.held)
        if not all(request.task.done() for request in oracle.ended) or len(self.world.engine) != held:
            return False
        return all(
            frontend.pool.in_flight.keys() == oracle.in_flight(index)
            and len(frontend.parts.cache) == len(oracle.cached[index])
            and len(frontend.remote._ledger) == held
            and frontend.remote.load == 0
            for index, frontend in enumerate(self.world.frontends)
        )

    def check(self) -> None:
        for tier in ("processor", "worker"):
            found = self.counted("semel_mm_cache_queries_total", tier), self.counted("semel_mm_cache_hits_total", tier)
            assert found == (self.oracle.queries[tier], self.oracle.hits[tier]), tier

    def counted(self, name: str, tier: str) -> float:
        return sum(frontend.metric(name, tier=tier) for frontend in self.world.frontends)


async def check_counts_equal_the_oracle(home: Path, model: Path, *, steps: int, seed: int = 1) -> None:
    load = Load(Oracle(2), random.Random(seed))
    async with AsyncExitStack() as stack:
        stack.enter_context(load.hearing_of_resets())
        pools = DrawnPool(waits=True), DrawnPool(waits=True)
        load.world = await stack.enter_async_context(shipped(home, model, *pools))
        stack.push_async_callback(load.close)
        for _ in range(steps):
            await load.step()
            load.check()
        while load.oracle.open:
            await load.make()
            await until(load.is_settled, within_s=5)
        load.check()
        queries, hits = load.oracle.queries, load.oracle.hits
        assert 0 < hits["processor"] < queries["processor"]
        assert 0 < hits["worker"] < queries["worker"] < queries["processor"]
        for name, expected in (("queries", queries), ("hits", hits)):
            exported = sum(one.metric(f"vllm:mm_cache_{name}_total") for one in load.world.frontends)
            assert exported == expected["processor"]


@pytest.mark.parametrize("seed", range(min(FACTOR, 2)))
async def test_counts_equal_an_oracle_s_under_concurrency_aborts_and_resets_D8(
    tmp_path: Path, folder: Path, seed: int
) -> None:
    await check_counts_equal_the_oracle(tmp_path, folder, steps=80, seed=seed)


def losing_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset sets the counters back too."""
    forget = assembly._Parts._forget

    def mutant(self: assembly._Parts) -> None:
        forget(self)
        self.lookups._counts.clear()

    monkeypatch.setattr(assembly._Parts, "_forget", mutant)


def counting_each_item_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count = assembly._Parts._count

    def mutant(self: assembly._Parts, fleet: Fleet, modality: Modality, _: int, hit: bool) -> None:
        count(self, fleet, modality, 1, hit)

    monkeypatch.setattr(assembly._Parts, "_count", mutant)


def joining_as_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who joins work that another has begun is counted as if there had been nothing to do."""
    make = Pipeline._make

    async def mutant(self: Pipeline, draft: Any, digest: Any) -> Any:
        if digest in self.flight._flown:
            count = sum(item.digest == digest for item in draft.items)
            self.lookups("image", -count, False)
            self.lookups("image", count, True)
        return await make(self, draft, digest)

    monkeypatch.setattr(Pipeline, "_make", mutant)


MUTANTS = {mutant.__name__: mutant for mutant in (losing_counts, counting_each_item_once, joining_as_hits)}


@pytest.mark.parametrize("mutate", MUTANTS.values(), ids=MUTANTS)
async def test_a_mutant_that_counts_otherwise_is_found_D8(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, mutate: Any
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        await check_counts_equal_the_oracle(tmp_path, folder, steps=40, seed=22)
