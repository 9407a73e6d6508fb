"""D8: `vllm:mm_cache_*`, summed over frontends and workers, is what an oracle says, whichever way items come.

What a frontend renders it counts itself; what is injected, or sent as tensors, its worker counts. The engine here
counts as semel makes vLLM's count; a real one is compared with bare vLLM in `tests/serve/test_engine_metrics.py`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from semel.compose import frontend as assembly
from semel.core import Submission
from semel.frontend.routes.render import SAFETENSORS
from semel.interchange.safetensors import read
from semel.lab.testing.engine import EchoEngine
from semel.worker.injection import inject
from tests.effort import FACTOR
from tests.frontend.rig import CONTRACT
from tests.frontend.shipped import DrawnPool, Shipped, shipped
from tests.frontend.test_client_features import FIELDS
from tests.render.conftest import folder
from tests.render.drawn import chat
from tests.waiting import until

__all__ = ["folder"]

CHAT, RENDER, GENERATE = "/v1/chat/completions", "/v1/chat/completions/render", "/inference/v1/generate"
NUMBERS = range(8)


@dataclass
class Oracle:
    """A fleet in which nothing is evicted."""

    cached: list[set[int]] = field(default_factory=lambda: [set(), set()])
    held: set[int] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)

    def chat(self, frontend: int, numbers: Sequence[int]) -> None:
        known = self.cached[frontend] | self.held
        self._count(len(numbers), sum(number in known for number in numbers))
        self.cached[frontend] |= set(numbers) - self.held
        self.held |= set(numbers)

    def tensors(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._count(1, number in self.held)
            self.held.add(number)

    def _count(self, queries: int, hits: int) -> None:
        self.counts.update(queries=queries, hits=hits)


@dataclass
class Load:
    """One run: what is done to the fleet, and to the oracle."""

    world: Shipped
    rng: random.Random
    oracle: Oracle = field(default_factory=Oracle)
    injected: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)

    async def step(self) -> None:
        deed = self.rng.choices([self.chat, self.send, self.name, self.inject, self.reset], [4, 4, 2, 2, 2])[0]
        self.done[deed.__name__] += 1
        await deed()
        await until(lambda: len(self.world.engine) == len(self.oracle.held), within_s=5)
        for frontend in self.world.frontends:
            await until(lambda: len(frontend.remote._ledger) == len(self.oracle.held), within_s=5)  # noqa: B023

    async def chat(self) -> None:
        frontend, numbers = self._choice()
        await self._ok(frontend, CHAT, {"messages": list(chat(*numbers).messages)})
        self.oracle.chat(frontend, numbers)

    async def send(self) -> None:
        """As tensors."""
        frontend, numbers = self._choice()
        await self._generate(frontend, await self._file(frontend, numbers))
        self.oracle.tensors(numbers)

    async def name(self) -> None:
        """By digest, what is held: that is neither rendered nor sent."""
        frontend, numbers = self._choice()
        if numbers := [number for number in numbers if number in self.oracle.held]:
            rendered = await self._ok(frontend, RENDER, {"messages": list(chat(*numbers).messages)})
            await self._ok(frontend, GENERATE, rendered.json())

    async def inject(self) -> None:
        frontend, numbers = self._choice()
        distinct = list(dict.fromkeys(numbers))
        entries = read(memoryview(await self._file(frontend, distinct)))

        def count(_: str, hit: bool) -> None:
            self.injected.update(queries=1, hits=int(hit))

        outcomes = await inject(self.world.engine, entries, count, peer="a test")
        assert {outcome.status for outcome in outcomes} <= {"stored", "held"}
        self.oracle.tensors(distinct)

    async def reset(self) -> None:
        await self.world.worker.reset()
        self.oracle.held.clear()
        for frontend, cached in zip(self.world.frontends, self.oracle.cached, strict=True):
            cached.clear()
            await until(lambda: not len(frontend.parts.cache), within_s=5)  # noqa: B023

    def counted(self) -> Counter[str]:
        """The fleet's sum."""
        engine = Counter(queries=self.world.engine.client_queries, hits=self.world.engine.client_hits)
        rendered = Counter(
            {
                name: int(sum(one.metric(f"vllm:mm_cache_{name}_total") for one in self.world.frontends))
                for name in ("queries", "hits")
            }
        )
        return rendered + engine + self.injected

    def _choice(self) -> tuple[int, list[int]]:
        return self.rng.randrange(2), self.rng.choices(NUMBERS, k=self.rng.randint(1, 3))

    async def _file(self, frontend: int, numbers: Sequence[int]) -> bytes:
        body = {"messages": list(chat(*numbers).messages)}
        content: bytes = (await self._ok(frontend, RENDER, body, accept=SAFETENSORS)).content
        return content

    async def _generate(self, frontend: int, content: bytes) -> None:
        client = self.world.frontends[frontend].client
        reply = await client.post(GENERATE, content=content, headers={"content-type": SAFETENSORS})
        assert reply.status_code == 200, reply.text

    async def _ok(self, frontend: int, path: str, body: Any, **headers: str) -> Any:
        reply = await self.world.frontends[frontend].client.post(path, json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        return reply


async def check_the_sum_equals_the_oracle_s(home: Path, model: Path, *, steps: int, seed: int) -> Load:
    contract = replace(CONTRACT, fields={"image": FIELDS})
    async with shipped(home, model, DrawnPool(), DrawnPool(), contract=contract) as world:
        load = Load(world, random.Random(seed))
        for _ in range(steps):
            await load.step()
            assert load.counted() == load.oracle.counts, load.done
    return load


@pytest.mark.parametrize("seed", range(min(FACTOR, 3)))
async def test_the_fleet_s_sum_equals_the_oracle_s_whichever_way_items_come_D8(
    tmp_path: Path, folder: Path, seed: int
) -> None:
    load = await check_the_sum_equals_the_oracle_s(tmp_path, folder, steps=60, seed=seed)
    assert len(load.done) == 5
    assert 0 < load.oracle.counts["hits"] < load.oracle.counts["queries"]


def counting_all_items_at_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM would by itself: what a frontend has rendered and counted is counted once more."""

    def mutant(self: EchoEngine, submission: Submission) -> None:
        self.client_queries += len(submission.prompt.items)

    monkeypatch.setattr(EchoEngine, "_count", mutant)


def counting_none_at_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EchoEngine, "_count", lambda *_: None)


def counting_nothing_that_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly._Parts, "_count", lambda *_: None)


MUTANTS = {
    mutant.__name__: mutant
    for mutant in (counting_all_items_at_the_worker, counting_none_at_the_worker, counting_nothing_that_is_rendered)
}


@pytest.mark.parametrize("mutate", MUTANTS.values(), ids=MUTANTS)
async def test_a_mutant_that_counts_an_item_in_two_processes_or_in_none_is_found_D8(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, mutate: Any
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        await check_the_sum_equals_the_oracle_s(tmp_path, folder, steps=40, seed=1)
