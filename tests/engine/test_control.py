"""The order in which new weights, pauses and caches of an engine follow one another. No engine is started."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from semel.engine.vllm.caches import EngineCaches
from semel.engine.vllm.control import RPC_METHODS, VllmControl
from semel.errors import EngineFailed, InvalidRequest

pytestmark = pytest.mark.slow  # it imports vLLM

FORGOTTEN = ["reset_encoder_cache", "reset_prefix_cache"]


class Llm:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.paused = False
        self.forgets_prefixes = True
        self.fails = False
        self.drained = asyncio.Event()
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=2, world_size_across_dp=4))

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert not clear_cache, "vLLM would forget the items"
        self.calls.append(f"pause {mode}")
        self.paused = True
        if mode == "wait":
            await self.drained.wait()

    async def resume_generation(self) -> None:
        self.calls.append("resume")
        self.paused = False

    async def is_paused(self) -> bool:
        return self.paused

    async def collective_rpc(self, method: str, *_: Any) -> list[Any]:
        self.calls.append(method)
        await asyncio.sleep(0)
        self._fail()
        return [None]

    def _fail(self) -> None:
        if self.fails:
            raise RuntimeError("/a/secret/path is no checkpoint")

    async def start_weight_update(self) -> None:
        self.calls.append("start_weight_update")
        self._fail()

    async def update_weights(self, request: Any) -> None:
        self.calls.append(f"update_weights {request.update_info}")
        self._fail()

    async def finish_weight_update(self, version: str | None) -> None:
        self.calls.append(f"finish_weight_update {version}")

    async def sleep(self, level: int, mode: str) -> None:
        self.calls.append(f"sleep {level} {mode}")

    async def reset_mm_cache(self) -> None:
        self.calls.append("reset_mm_cache")

    async def reset_encoder_cache(self) -> None:
        self.calls.append("reset_encoder_cache")

    async def reset_prefix_cache(self, *, reset_connector: bool) -> bool:
        assert reset_connector, "a connector would bring old prefixes back"
        self.calls.append("reset_prefix_cache")
        return self.forgets_prefixes


class Tier:
    def __init__(self, llm: Llm) -> None:
        self._llm = llm

    def note_new_weights(self) -> None:
        self._llm.calls.append("note")


def control() -> tuple[VllmControl, Llm, EngineCaches]:
    llm = Llm()
    items: Any = SimpleNamespace(clear=lambda: llm.calls.append("items"))
    model: Any = SimpleNamespace(known=SimpleNamespace(forget=lambda: None))
    caches = EngineCaches(llm, items, model, asyncio.Lock())
    tier: Any = Tier(llm)
    return VllmControl(llm, caches, tier), llm, caches


@pytest.mark.parametrize("was_paused", [False, True])
async def test_weights_change_between_two_steps_and_nothing_of_before_outlives_it(was_paused: bool) -> None:
    engine, llm, _ = control()
    llm.paused = was_paused
    assert await engine.collective_rpc("reload_weights", (), {}, None) == [None]
    around = ([], []) if was_paused else (["pause keep"], ["resume"])
    assert llm.calls == ["note", *around[0], "reload_weights", *FORGOTTEN, *around[1]]
    assert llm.paused == was_paused


async def test_a_change_that_fails_halfway_counts_as_one_and_its_reason_is_for_the_log_S7() -> None:
    engine, llm, _ = control()
    llm.fails = True
    with pytest.raises(EngineFailed) as failed:
        await engine.collective_rpc("reload_weights", (), {}, None)
    assert "secret" not in str(failed.value)
    assert llm.calls == ["note", "pause keep", "reload_weights", *FORGOTTEN]
    assert await llm.is_paused(), "layers may be without weights"
    llm.fails = False
    await engine.collective_rpc("reload_weights", (), {}, None)
    assert not await llm.is_paused()


async def test_a_folder_that_is_not_there_reaches_no_engine(tmp_path: Path) -> None:
    engine, llm, _ = control()
    with pytest.raises(InvalidRequest, match="no such folder"):
        await engine.collective_rpc("reload_weights", (), {"weights_path": str(tmp_path / "none")}, None)
    assert llm.calls == []
    await engine.collective_rpc("reload_weights", (), {"weights_path": str(tmp_path)}, None)


async def test_an_engine_is_held_through_a_transfer_and_each_step_of_it_is_a_change() -> None:
    engine, llm, _ = control()
    await engine.update_weights("start_weight_update")
    await engine.update_weights("update_weights", {"names": ["a"]})
    with pytest.raises(InvalidRequest, match="finish_weight_update first"):
        await engine.resume()
    with pytest.raises(InvalidRequest, match="finish_weight_update first"):
        await engine.wake_up(None)
    await engine.update_weights("finish_weight_update", "7")
    steps = [["pause keep", "start_weight_update"], ["update_weights {'names': ['a']}"], ["finish_weight_update 7"]]
    assert llm.calls == [*(call for step in steps for call in ("note", *step, *FORGOTTEN)), "resume"]


async def test_a_transfer_that_cannot_begin_holds_nothing_and_one_that_breaks_off_holds_the_engine() -> None:
    engine, llm, _ = control()
    llm.fails = True
    with pytest.raises(EngineFailed):
        await engine.update_weights("start_weight_update")
    assert not await llm.is_paused()
    llm.fails = False
    await engine.update_weights("start_weight_update")
    llm.fails = True
    with pytest.raises(EngineFailed):
        await engine.update_weights("update_weights", {})
    assert await llm.is_paused()
    await engine.resume()
    assert not await llm.is_paused(), "its operator decides"


async def test_a_transfer_that_never_began_has_no_next_step() -> None:
    engine, llm, _ = control()
    for step in ("update_weights", "finish_weight_update"):
        with pytest.raises(InvalidRequest, match="start_weight_update first"):
            await engine.update_weights(step)
    assert llm.calls == []


async def test_a_pause_of_the_trainer_s_own_outlives_a_transfer() -> None:
    engine, llm, _ = control()
    await engine.pause("abort", clear_cache=False)
    await engine.update_weights("start_weight_update")
    await engine.update_weights("finish_weight_update")
    assert await llm.is_paused()
    await engine.resume()
    await engine.update_weights("start_weight_update")
    await engine.pause("keep", clear_cache=False)
    await engine.update_weights("finish_weight_update")
    assert await llm.is_paused(), "also of one that came later"


async def test_only_named_methods_can_be_called_S34() -> None:
    engine, llm, _ = control()
    for method in ("execute_model", "load_model", "__class__", "save_sharded_state"):
        with pytest.raises(InvalidRequest, match="cannot be called; use"):
            await engine.collective_rpc(method, (), {}, None)
    assert llm.calls == []
    assert RPC_METHODS.keys() == {"reload_weights", "reset_weights", "compute_weight_checksums"}


@pytest.mark.parametrize(("mode", "clear_cache"), [("abort", True), ("abort", False), ("keep", True)])
async def test_a_pause_forgets_what_depends_on_weights_if_asked_and_never_the_items(
    mode: Any, clear_cache: bool
) -> None:
    engine, llm, _ = control()
    await engine.pause(mode, clear_cache=clear_cache)
    assert llm.calls == [f"pause {mode}", *(FORGOTTEN if clear_cache and mode != "keep" else [])]


async def test_weights_wait_for_a_pause_that_waits_for_requests() -> None:
    engine, llm, _ = control()
    pausing = asyncio.create_task(engine.pause("wait", clear_cache=False))
    await asyncio.sleep(0)
    changing = asyncio.create_task(engine.collective_rpc("reload_weights", (), {}, None))
    await asyncio.sleep(0.01)
    assert llm.calls == ["pause wait"], "steps are still made"
    llm.drained.set()
    await asyncio.gather(pausing, changing)
    assert llm.calls == ["pause wait", "note", "reload_weights", *FORGOTTEN]


async def test_nobody_resumes_while_weights_change() -> None:
    engine, llm, _ = control()
    llm.paused = True
    changing = asyncio.create_task(engine.collective_rpc("reload_weights", (), {}, None))
    await asyncio.sleep(0)
    await asyncio.gather(changing, engine.resume())
    assert llm.calls == ["note", "reload_weights", *FORGOTTEN, "resume"]


async def test_prefixes_of_requests_that_run_on_are_found_by_nobody_else() -> None:
    engine, llm, caches = control()
    assert caches.salt("\0acme") == "\0acme"
    await engine.collective_rpc("reload_weights", (), {}, None)
    assert caches.salt("\0acme") == "\0acme", "there were none left"
    llm.forgets_prefixes = False
    await engine.collective_rpc("reload_weights", (), {}, None)
    first = caches.salt("\0acme")
    assert first is not None
    assert first.startswith("\0acme/")
    await engine.collective_rpc("reload_weights", (), {}, None)
    assert caches.salt("\0acme") not in (first, "\0acme")


async def test_a_deep_sleep_lets_go_of_items_and_of_weights_as_far_as_it_does() -> None:
    engine, llm, _ = control()
    for level in (0, 1, 2):
        await engine.sleep(level, "abort")
    calls = [["sleep 0 keep"], ["items", "sleep 1 keep"], ["note", "items", "sleep 2 keep"]]
    assert llm.calls == [call for of_level in calls for call in ("pause abort", *of_level)]
