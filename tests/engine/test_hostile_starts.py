"""What lies to the encoder, on engines of their own: with vLLM's own worker, and with processes that run ahead.

vLLM's own worker is the control of the guard: each lie ends its engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from semel.errors import EngineDead
from tests.engine.engines import Start, running_as_worker
from tests.engine.families import FAMILIES, Change
from tests.engine.hostile import CONTRADICTIONS, MISFITS, disguised, is_ended_alone, outcomes, unchecked
from tests.engine.parity import running

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(500)]

MISFIT, RAISES = MISFITS["more room than embeddings"], CONTRADICTIONS["llava: too few pixels"][1]


@pytest.mark.parametrize("change", [MISFIT, RAISES], ids=["misfit", "raises"])
async def test_an_engine_without_the_guard_dies_for_everybody_S9(
    tiny: Callable[[str], Path], change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tiny("llava"), worker_cls="auto", max_model_len=4096) as rig:
        good = await rig.render(FAMILIES["llava"].good())
        await rig.answer(good)
        unchecked(rig, monkeypatch)
        async with asyncio.timeout(120):
            for asked in (disguised(good, change), good):
                with pytest.raises(EngineDead):
                    await rig.answer(asked)


async def test_with_tensor_parallelism_and_asynchronous_scheduling_it_is_ended_alone_S9(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two worker processes find the same, and the next step is planned before the scheduler hears of it."""
    schedule_ahead(monkeypatch)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    flags = ("--tensor-parallel-size", "2", "--async-scheduling", "--max-model-len", "4096")
    async with running_as_worker(Start("llava", flags), tiny("llava")) as rig:
        config = rig.llm.vllm_config
        assert (config.parallel_config.world_size, config.scheduler_config.async_scheduling) == (2, True)
        good = await rig.render(FAMILIES["llava"].good())
        unchecked(rig, monkeypatch)
        first = await outcomes(rig, {"hostile": disguised(good, RAISES)})  # nothing was encoded before it
        assert str(first["hostile"]).startswith("the encoder failed")
        await is_ended_alone(rig, good, disguised(good, MISFIT), "^the encoder made 36 embeddings")
        await is_ended_alone(rig, good, disguised(good, RAISES), "^the encoder failed")


def schedule_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM switches asynchronous scheduling off on a CPU, where it works all the same."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_update_config(_: Any, config: Any) -> None:
        is_async = config.scheduler_config.async_scheduling
        check(config)
        config.scheduler_config.async_scheduling = is_async

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config))
