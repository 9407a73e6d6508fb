"""What a feature that lies to the encoder does to an engine with vLLM's own worker: the control of the guard.

Each of these ends an engine, so each takes one of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from semel.errors import EngineDead
from tests.engine.families import FAMILIES, Change
from tests.engine.hostile import CONTRADICTIONS, MISFITS, disguised, unchecked
from tests.engine.parity import running

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    "change", [MISFITS["more room than embeddings"], CONTRADICTIONS["llava: too few pixels"][1]], ids=["room", "raises"]
)
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
