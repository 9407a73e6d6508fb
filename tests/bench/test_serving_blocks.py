"""Figures by blocks of requests: serving CPU, context switches, and what a repeat adds beyond the engine in process."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from semel.lab.bench.serving import blocks, run
from semel.lab.bench.serving.alternate import Pair
from semel.lab.bench.serving.bench import Bench, Effort, Side
from semel.lab.bench.serving.blocks import Load, block_rows, measure_blocks
from semel.lab.bench.serving.client import Answer, Client
from semel.lab.bench.serving.figures import LIMITS, TARGETS, Row, compared
from semel.lab.bench.serving.floor import EngineAnswer, Floor
from semel.lab.bench.serving.images import Images, chat
from semel.lab.bench.serving.run import Running, measure
from semel.lab.bench.serving.scenarios.again import again, again_next_to_engine
from semel.lab.bench.serving.scenarios.answers import answers
from semel.lab.bench.serving.scenarios.latency import text
from semel.lab.bench.serving.servers import Launch, Server
from semel.lab.verify.run import speed_of

EFFORT = Effort(3, 1, 2, 0.1, 10, 2)


class Metered(Client):
    """A server whose requests cost a known amount of CPU, of switches and of time; one with an image ten times more."""

    def __init__(self, cpu_ms: float, switches: int, seconds: float = 0.01) -> None:
        super().__init__("http://127.0.0.1:1")
        self.cpu_ms, self.switches, self.seconds = cpu_ms, switches, seconds
        self.asked: Counter[tuple[bool, int]] = Counter()
        self.weight = self.in_flight = self.most_in_flight = 0
        self.opened = 0

    async def ask(self, path: str, body: bytes, *, accept: str = "*/*") -> Answer:  # noqa: ARG002
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0)
        self.in_flight -= 1
        asked = json.loads(body)
        self.asked[asked.get("stream", False), asked["max_tokens"]] += 1
        weight = 10 if b"image_url" in body else 1
        self.weight += weight
        return Answer(200, b"{}", self.seconds * weight)

    async def read(self, path: str) -> str:  # noqa: ARG002
        return ""

    def wider(self, connections: int) -> Client:
        self.opened += connections
        return self


def bench_of(monkeypatch: pytest.MonkeyPatch, mine: Metered, theirs: Metered) -> Bench:
    """A bench of two servers, whose processes have the numbers 1 and 2."""
    clients = {1: mine, 2: theirs}

    def cost(pids: Sequence[int], unit: str) -> Any:
        return sum(clients[pid].weight * getattr(clients[pid], unit) for pid in pids)

    monkeypatch.setattr(Server, "pids", lambda self: list(self.roots))
    monkeypatch.setattr(blocks, "run_s", lambda pids: cost(pids, "cpu_ms") / 1e3)
    monkeypatch.setattr(blocks, "context_switches", lambda pids: cost(pids, "switches"))
    sides = [Side(Server(("http://127.0.0.1:1",), (pid,)), client) for pid, client in clients.items()]
    return Bench(Pair(*sides), None, Images(1), EFFORT, lambda *_: None)


def named(rows: Sequence[Row]) -> dict[str, Row]:
    return {row.name: row for row in rows}


@pytest.mark.parametrize(("switches", "is_kept"), [(17, True), (23, False)])
async def test_a_text_is_judged_by_serving_cpu_and_switches(
    monkeypatch: pytest.MonkeyPatch, switches: int, is_kept: bool
) -> None:
    rows = named(await text(bench_of(monkeypatch, Metered(2.6, switches), Metered(2.0, 17))))
    serial = rows["text: context switches, 1 at a time"]
    assert (serial.semel.value, serial.vllm and serial.vllm.value, serial.ok) == (switches, 17, is_kept)
    at_16 = rows["text: serving CPU, 16 at a time"]
    assert at_16.ratio is not None
    assert at_16.ratio.value == pytest.approx(1.3)
    assert at_16.ok is False


async def test_answers_are_streamed_and_not_one_and_sixteen_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = Metered(1.1, 5), Metered(1.0, 5)
    bench = bench_of(monkeypatch, mine, theirs)
    rows = named(await answers(bench))
    assert mine.opened == theirs.opened == 2 * 17 * 3, "new ones for each block: idle ones are closed"
    assert mine.asked == theirs.asked == {(False, 128): 17 * 3, (True, 128): 17 * 3, (False, 1): mine.opened}
    assert mine.most_in_flight == 16
    limited = [row for row in rows.values() if row.limit is not None]
    assert [(row.ok, row.name) for row in limited] == [
        (True, f"answers: not streamed, {at_a_time} at a time, serving CPU") for at_a_time in (1, 16)
    ]
    assert len(rows) == 4 * 3
    elsewhere = replace(bench, sides=Pair(*(Side(Server(("http://x",)), one) for one in (mine, theirs))))
    assert {name.rpartition(", ")[2] for name in named(await answers(elsewhere))} == {"latency"}


async def test_a_figure_of_a_token_is_of_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of(monkeypatch, Metered(128.0, 256), Metered(64.0, 128))
    measured = await measure_blocks(bench, "", Load(chat("?"), 3, units=128), turns=2)
    cpu, switches, latency = block_rows("token: {}", measured)
    assert (cpu.name, switches.semel.value) == ("token: serving CPU", 2.0)
    assert cpu.semel.value == pytest.approx(1.0)
    assert latency.semel.value == pytest.approx(10 / 128)


def test_the_engine_s_processes_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    roles = {"frontend": [1], "engine core": [2], "engine worker": [3, 4], "worker": [5], "other": [6]}
    monkeypatch.setattr(Server, "roles", lambda _: roles)
    assert Server(()).serving_pids() == [1, 5, 6]


@pytest.mark.parametrize(("cpu_ms", "is_kept"), [(1.7, True), (1.9, False)])
async def test_the_cpu_that_a_repeat_adds_is_compared_with_what_it_adds_to_bare_vllm(
    monkeypatch: pytest.MonkeyPatch, cpu_ms: float, is_kept: bool
) -> None:
    rows = named(await again(bench_of(monkeypatch, Metered(cpu_ms, 1), Metered(10.0, 1))))
    row = rows["again: HD, serving CPU that the image adds"]
    assert row.semel.value == pytest.approx(9 * cpu_ms)
    assert row.ok is is_kept
    assert rows["again: 1024, CPU time of all processes"].semel.value == pytest.approx(10 * cpu_ms)


class Engine(Floor):
    """An engine in process that takes 5 ms for a text, and 10 ms more for an image."""

    def __init__(self) -> None:
        self.max_tokens = 0

    async def ask(self, body: bytes) -> EngineAnswer:
        return EngineAnswer(0.015 if b"image_url" in body else 0.005, 0.0, 1)


@pytest.mark.parametrize(("text_ms", "beyond_ms", "kept"), [(1.2, 0.8, 2), (1.3, 1.7, 2), (1.35, 2.15, 1), (2, 8, 0)])
async def test_a_repeat_is_judged_by_what_the_image_adds_beyond_the_engine(
    monkeypatch: pytest.MonkeyPatch, text_ms: float, beyond_ms: float, kept: int
) -> None:
    """Nine times the text's latency is added by the image, 10 ms of it by the engine."""
    mine = Metered(1.0, 1, seconds=text_ms / 1e3)
    rows = await again_next_to_engine(bench_of(monkeypatch, mine, mine), mine, Engine())
    judged = [row for row in rows if row.limit is not None]
    assert [row.semel.value for row in judged] == pytest.approx([beyond_ms] * 2)
    assert sum(bool(row.ok) for row in judged) == kept
    adds = named(rows)["again: HD, what the image adds, next to the engine in process"]
    assert adds.vllm is not None
    assert adds.vllm.value == pytest.approx(10)


@pytest.mark.parametrize("has_engine", [True, False])
async def test_one_engine_in_process_serves_all_scenarios_and_none_starts_unasked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_engine: bool
) -> None:
    done: list[str] = []

    def step(name: str) -> Any:
        async def note(*_: object) -> list[Row]:
            done.append(name)
            return []

        return note

    @asynccontextmanager
    async def engine(_: Launch) -> AsyncIterator[Floor]:
        done.append("engine starts")
        yield Engine()
        done.append("engine ends")

    names = ["again", "agent", "frontends"]
    for name in names:
        monkeypatch.setitem(run.SCENARIOS, name, step(name))
    monkeypatch.setattr(run, "_NEXT_TO_ENGINE", {name: step(f"{name}, engine") for name in names[:2]})
    monkeypatch.setattr(run, "engine_in_process", engine)
    mine = Metered(1.0, 1)
    bench = replace(bench_of(monkeypatch, mine, mine), launch=Launch("m", (), tmp_path))
    await measure(Running(bench, step("vLLM ends")), names, has_engine=has_engine)
    beside = ["engine starts", "again, engine", "agent, engine", "engine ends"] if has_engine else []
    assert done == ["again", "agent", "vLLM ends", *beside, "frontends"]


def test_a_target_is_stricter_than_the_limit_that_any_machine_keeps() -> None:
    both = TARGETS.keys() & LIMITS.keys()
    assert both
    for name in both:
        assert TARGETS[name].of == LIMITS[name].of
        assert LIMITS[name].is_kept(TARGETS[name].value)
        assert not TARGETS[name].is_kept(LIMITS[name].value)


def test_verify_holds_a_machine_to_limits_and_not_to_targets() -> None:
    rows = [
        compared("text: latency", "ms", Pair([11.0] * 5, [10.0] * 5)),
        compared("text: context switches, 1 at a time", "", Pair([23.0] * 5, [17.0] * 5)),
    ]
    assert [row.ok for row in rows] == [False, False], "the control: both targets are missed"
    section = speed_of(rows)
    assert (section.outcome, section.summary) == ("passed", "1 limits kept")
