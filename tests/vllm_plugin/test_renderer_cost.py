"""CPU of vLLM's one thread for items, per new image: the ceiling of an API server on any machine."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from semel.lab.bench.timing import without_garbage_collection
from tests.vllm_plugin.image_files import photo
from tests.vllm_plugin.rendering import opened, rendered, renderers, unopened

pytestmark = [pytest.mark.alone, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

MAX_RATIO = 0.15
IMAGES = 9
ROUNDS = 3


def files(first: int) -> list[bytes]:
    made = []
    for seed in range(first, first + IMAGES):
        buffer = io.BytesIO()
        photo(seed, 1024, 1024).save(buffer, "JPEG")
        made.append(buffer.getvalue())
    return made


async def serial_cpu_s(renderer: Any, load: Callable[[bytes], Any], first: int) -> float:
    """CPU of the thread for these images, each new."""
    for data in files(first)[:2]:
        await rendered(renderer, [load(data)])
    thread = renderer._mm_executor
    before: float = thread.submit(time.thread_time).result()
    for data in files(first)[2:]:
        await rendered(renderer, [load(data)])
    used: float = thread.submit(time.thread_time).result() - before
    return used / (IMAGES - 2)


async def test_a_new_image_takes_a_seventh_of_the_serial_threads_cpu(tiny: Callable[[str], Path]) -> None:
    with renderers("qwen2-vl", tiny("qwen2-vl")) as both, without_garbage_collection():
        rounds = [
            (await serial_cpu_s(both.stock, opened, first), await serial_cpu_s(both.door, unopened, first))
            for first in range(0, ROUNDS * IMAGES, IMAGES)
        ]
    assert median(door / stock for stock, door in rounds) <= MAX_RATIO, f"seconds with vLLM and with the door: {rounds}"
