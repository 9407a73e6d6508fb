"""A worker whose operator pauses it: what its frontends hear, and what becomes of requests that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from semel.core import Submission, Tenant
from semel.engine.protocol import PauseMode, WeightUpdate
from semel.errors import EngineFailed
from semel.fairness.turns import EngineWindow
from semel.fleet.fleet import Fleet
from semel.fleet.stream import RemoteStream
from semel.telemetry import metrics
from semel.worker.control import WorkerControl
from semel.worker.worker import Worker
from tests.waiting import until
from tests.worker.pairing import REQUEST_IDS, Frontend, Rig, expected, prompt, rig

WINDOW = EngineWindow(sequences=2, step_tokens=2_048)  # and one in advance

FULL = (1, 2, 4)


class Switch:
    """The part of an engine that an operator switches; vLLM's own is in `tests/serve/test_weight_updates.py`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.paused = False
        self.version = "default"
        self.fails = False

    def _call(self, *call: Any) -> None:
        self.calls.append(call)
        if self.fails:
            raise EngineFailed(f"{call[0]} failed in the engine; the worker's log says why")

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        self._call("pause", mode, clear_cache)
        self.paused = True

    async def resume(self) -> None:
        self._call("resume")
        self.paused = False

    async def is_paused(self) -> bool:
        return self.paused

    async def sleep(self, level: int, mode: PauseMode) -> None:
        self._call("sleep", level, mode)
        self.paused = True

    async def wake_up(self, tags: Sequence[str] | None) -> bool:
        self._call("wake_up", tags)
        self.paused = tags is not None and "kv_cache" not in tags
        return not self.paused

    async def is_sleeping(self) -> bool:
        return self.paused

    async def release_kv_cache_memory(self) -> None:
        self._call("release_kv_cache_memory")

    async def abort(self, request_ids: Collection[str]) -> None:
        self._call("abort", *sorted(request_ids))

    async def update_weights(self, step: WeightUpdate, info: Any = None) -> None:
        self._call(step, info)

    async def collective_rpc(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], timeout_s: float | None
    ) -> list[Any]:
        self._call("collective_rpc", method, tuple(args), dict(kwargs), timeout_s)
        return [None, {"a": "1"}, 5]

    async def set_weight_version(self, version: str) -> None:
        self.version = version

    async def weight_version(self) -> str:
        return self.version

    async def weight_checksums(self) -> list[Mapping[str, str]]:
        return [{"tp0:a": "1"}, {"tp1:a": "2"}]

    def world_size(self, *, include_dp: bool) -> int:
        return 4 if include_dp else 2

    async def forget_prefixes(self, *, in_connector: bool) -> None:
        self._call("forget_prefixes", in_connector)

    async def forget_items(self) -> None:
        self._call("forget_items")

    async def forget_outputs(self) -> None:
        self._call("forget_outputs")


def paused_metric(worker: Worker) -> float:
    return next(value for metric, value, _ in worker.samples() if metric is metrics.ENGINE_PAUSED)


async def reasons(stream: RemoteStream) -> list[str | None]:
    try:
        return [output.finish_reason async for output in stream]
    finally:
        await stream.close()


async def tokens(stream: RemoteStream) -> tuple[int, ...]:
    try:
        return tuple([token async for output in stream for token in output.token_ids])
    finally:
        await stream.close()


async def submit(frontend: Frontend, number: int, *, n: int = 1) -> RemoteStream:
    """Submit as a tenant: those without a name take no turns."""
    salt = Tenant("acme").prefix_salt
    submission = Submission(f"r{next(REQUEST_IDS)}", prompt([number]), {}, {"n": n}, salt)
    return await frontend.worker.submit(submission, frontend.make)


async def waiting(made: Rig, *, n: int = 1) -> tuple[list[asyncio.Task[Any]], asyncio.Task[RemoteStream]]:
    """Requests that fill the engine's window, and one that waits for its turn."""
    (frontend,) = made.frontends
    made.engine.hangs = True
    running = [asyncio.create_task(tokens(await submit(frontend, number))) for number in FULL]
    last = asyncio.create_task(submit(frontend, 3, n=n))
    await until(lambda: len(made.worker.request_ids()) == 4)
    await until(lambda: any(metric is metrics.ENGINE_WAITING and value for metric, value, _ in made.worker.samples()))
    return running, last


async def test_an_abort_ends_what_waits_for_its_turn_as_the_engine_ends_what_it_has(tmp_path: Path) -> None:
    async with rig(tmp_path, window=WINDOW) as made:
        running, last = await waiting(made, n=2)
        await WorkerControl(Switch(), made.worker).pause("abort", clear_cache=True)
        assert await reasons(await last) == ["abort", "abort"]
        made.engine.hangs = False
        assert [await task for task in running] == [expected([number]) for number in FULL], (
            "the engine's own, which has no core"
        )
        assert await made.frontends[0].ask(3) == expected([3]), "the place in the queue is free again"


@pytest.mark.parametrize("mode", ["wait", "keep"])
async def test_other_modes_let_wait_what_waits(tmp_path: Path, mode: PauseMode) -> None:
    async with rig(tmp_path, window=WINDOW) as made:
        running, last = await waiting(made)
        control = WorkerControl(Switch(), made.worker)
        await control.pause(mode, clear_cache=True)
        await asyncio.sleep(0.05)
        assert not last.done()
        made.engine.hangs = False
        await control.resume()
        assert [await task for task in running] == [expected([number]) for number in FULL]
        assert (await reasons(await last))[-1] == "stop"


async def test_requests_are_ended_by_their_ids_and_only_they(tmp_path: Path) -> None:
    async with rig(tmp_path, window=WINDOW) as made:
        running, last = await waiting(made)
        waits = max(made.worker.request_ids(), key=lambda one: int(one[1:]))  # the last one
        switch = Switch()
        control = WorkerControl(switch, made.worker)
        assert await control.abort_requests(["unknown"]) == 0
        assert await control.abort_requests([waits]) == 1
        assert (await reasons(await last), switch.calls) == (["abort"], [])
        assert await control.abort_requests([]) == 3
        assert [call[0] for call in switch.calls] == ["abort"]
        made.engine.hangs = False
        await asyncio.gather(*running)


async def test_frontends_hear_of_a_pause_and_of_its_end(tmp_path: Path) -> None:
    async with rig(tmp_path, frontends=2) as made:
        switch = Switch()
        control = WorkerControl(switch, made.worker)
        await control.pause("wait", clear_cache=False)
        await until(lambda: all(one.worker.is_paused for one in made.frontends))
        assert paused_metric(made.worker) == 1
        await control.wake_up(["weights"])
        assert made.frontends[0].worker.is_paused, "the rest sleeps on"
        await control.wake_up(None)
        await until(lambda: not any(one.worker.is_paused for one in made.frontends))
        assert paused_metric(made.worker) == 0


async def test_a_pause_that_fails_is_none_for_the_frontends(tmp_path: Path) -> None:
    async with rig(tmp_path) as made:
        switch = Switch()
        switch.fails = True
        with pytest.raises(EngineFailed):
            await WorkerControl(switch, made.worker).sleep(1, "wait")
        assert paused_metric(made.worker) == 0


async def test_a_paused_worker_gets_requests_only_if_all_are_paused(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir(0o700)
    async with rig(folders[0]) as one, rig(folders[1]) as other:
        first, second = one.frontends[0].worker, other.frontends[0].worker
        fleet = Fleet([first, second])
        chosen = {fleet.choose([], prefix=bytes([number])) for number in range(32)}
        assert chosen == {first, second}
        await WorkerControl(Switch(), one.worker).pause("keep", clear_cache=False)
        await until(lambda: first.is_paused)
        assert {fleet.choose([], prefix=bytes([number])) for number in range(32)} == {second}
        await WorkerControl(Switch(), other.worker).pause("keep", clear_cache=False)
        await until(lambda: second.is_paused)
        assert {fleet.choose([], prefix=bytes([number])) for number in range(32)} == {first, second}
