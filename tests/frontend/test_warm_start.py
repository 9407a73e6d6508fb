"""The first render-only request after a start, with a real pool on a tiny model (E3, E4).

Its cost is CPU time, of the serving process and the preprocessing process together: that is what a cold start wastes,
and neighbours on the machine do not change it.
"""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from semel.cache import SharedCache
from semel.compose import compose_pipeline
from semel.core import Key, Target
from semel.media.decode.warmup_media import sample_image
from semel.processing import Pool
from semel.render import warm_up
from tests.frontend.rig import Rig, rig

Folder = Callable[[str], Path]
TARGET = Target("float32", "engine")
LATER = 10
STARTS = 2
"""How often it is tried: a neighbour that empties the processor's caches can spoil one. Cold it is 2.7 to 3.7."""


def body(number: int) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(sample_image(number).data).decode()
    part = {"type": "image_url", "image_url": {"url": url}}
    return {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "hello"}]}]}


def cpu_s(pids: Sequence[int]) -> float:
    """The CPU time of this process and of others, by Linux's clock of each."""
    return time.process_time() + sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


async def cost_s(app: Rig, pool: Pool, number: int) -> float:
    sent = body(number)
    begin = cpu_s(pool.pids)
    response = await app.post("/v1/chat/completions/render", sent)
    spent = cpu_s(pool.pids) - begin
    assert response.status_code == 200, response.text
    return spent


async def costs_after_start(folder: Path, home: Path, *, limits: dict[Any, int]) -> list[float]:
    """What the first requests after a start cost, each with a new image."""
    memory = SharedCache.create(64 << 20)
    pool = await Pool.start(folder, TARGET, processes=1, memory=memory)
    try:
        library = compose_pipeline(folder, TARGET, Key(bytes(32)))
        pipeline = replace(library, process=pool.process, cache=memory)
        await warm_up(pipeline, limits, processes=len(pool.pids))
        assert len(memory) == memory.nbytes == memory.evictions == len(pipeline.layouts) == 0
        async with rig(home, pipeline) as app:
            assert (await app.client.get("/ready")).status_code == 200  # how one knows that it has started
            return [await cost_s(app, pool, number) for number in range(1, 2 + LATER)]
    finally:
        await pool.close()
        memory.close()


@pytest.mark.slow
@pytest.mark.alone
async def test_the_first_request_after_a_warm_up_costs_at_most_1_5_times_a_later_one_E4(
    tiny: Folder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ratios: list[float] = []
    with caplog.at_level(logging.INFO, "semel.render"):
        while len(ratios) < STARTS and min(ratios, default=2.0) > 1.5:
            home = tmp_path / str(len(ratios))
            first, *later = await costs_after_start(tiny("qwen2-vl"), home, limits={"image": 1})
            ratios.append(first / median(later))
    assert min(ratios) <= 1.5, f"{ratios} times the median of the next {LATER}"
    lines = [record.getMessage() for record in caplog.records if record.name == "semel.render.warmup"]
    assert [line.partition(" in ")[0] for line in lines[:2]] == [
        "warmed up execute (text, image)",
        "warmed up inspect (text, image)",
    ]
