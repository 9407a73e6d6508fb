"""S18: a good request beside fifty hostile ones at a time is answered almost as fast as alone.

Real processes: a frontend with two preprocessing processes, an engine that answers at once, and the hostile clients.
Alone and beside take turns, so that whatever else the machine does is in both.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles

import pytest

from semel.core import Target
from tests.conftest import Folder
from tests.frontend.test_start import Started, started
from tests.security.hostile import KINDS, chat, image, jpeg

ROUNDS = 3
REQUESTS = 100
LIMITS = ("--max-body-bytes", str(8 * 1024**2), "--processes", "2")


class Attackers:
    """The process of the hostile clients."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.answers: Counter[str] = Counter()

    def begin(self) -> None:
        self._say("go")
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "begun\n"

    def end(self) -> None:
        self._say("stop")
        assert self._process.stdout is not None
        self.answers.update(json.loads(self._process.stdout.readline()))

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()


@contextmanager
def attackers(port: int) -> Iterator[Attackers]:
    command = [sys.executable, "-m", "tests.security.hostile", str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Attackers(process)
        finally:
            process.kill()


async def p95_ms(frontend: Started, seed: random.Random) -> float:
    """The 95th percentile of the latency of good requests, one after the other, each with a new image."""
    taken = []
    for _ in range(REQUESTS):
        body = chat(image(jpeg(seed, 96)), {"type": "text", "text": "What is in this picture?"})
        began = time.perf_counter()
        response = await frontend.client.post("/v1/chat/completions", content=body)
        taken.append(1_000 * (time.perf_counter() - began))
        assert response.status_code == 200, response.text
    return quantiles(taken, n=20)[-1]


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
async def test_beside_fifty_hostile_requests_a_good_one_takes_at_most_twice_as_long(
    tiny: Folder, tmp_path: Path
) -> None:
    seed = random.Random(18)
    alone, beside = [], []
    async with started(tiny("qwen2-vl"), tmp_path, Target("float32", "engine"), *LIMITS) as frontend:
        with attackers(frontend.client.base_url.port or 0) as hostile:
            await p95_ms(frontend, seed)
            for _ in range(ROUNDS):
                alone.append(await p95_ms(frontend, seed))
                await asyncio.to_thread(hostile.begin)
                beside.append(await p95_ms(frontend, seed))
                await asyncio.to_thread(hostile.end)
    ratios = [theirs / mine for mine, theirs in zip(alone, beside, strict=True)]
    figures = f"p95 alone {median(alone):.1f} ms, beside {median(beside):.1f} ms, pair by pair {ratios}"
    assert {answer.split()[0] for answer in hostile.answers} >= KINDS.keys() - {"slow"}
    assert not [answer for answer in hostile.answers if answer.endswith((" 200", " 500"))]
    assert median(ratios) <= 2, f"{figures}; {dict(hostile.answers)}"
