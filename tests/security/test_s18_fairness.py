"""S18: the requests of one tenant beside fifty of another at a time.

Real processes: a frontend with two preprocessing processes, an engine that answers at once, and the hostile clients,
who have a key of their own. Alone and beside take turns, so that whatever else the machine does is in both.

Beside requests that are refused a good one is almost as fast as alone. Beside valid and dear ones it is answered, and
the frontend stays ready; how late it is answered has no bound here. For preprocessing it has one
(`test_s21_pool_turns`).
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from statistics import median, quantiles

import pytest

from semel.core import Target
from semel.fairness.queue import FairQueue
from tests.conftest import Folder
from tests.frontend.test_start import Started, started
from tools.security.hostile import DEAR, REFUSED, chat, image, jpeg

ROUNDS = 5
REQUESTS = 100
LIMITS = ("--max-body-bytes", str(8 * 1024**2), "--preprocessing-processes", "2")
ACME, UMBRA = "acme-0123456789abcdef", "umbra-0123456789abcdef"
GOOD = {"authorization": f"Bearer {ACME}"}


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
def attackers(frontend: Started, kinds: str) -> Iterator[Attackers]:
    port = str(frontend.client.base_url.port)
    command = [sys.executable, "-m", "tools.security.hostile", port, UMBRA, kinds]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Attackers(process)
        finally:
            process.kill()


@asynccontextmanager
async def two_tenants(tiny: Folder, home: Path) -> AsyncIterator[Started]:
    """A frontend with a key for each of two tenants."""
    keys = home / "api-keys"
    keys.touch(mode=0o600)
    keys.write_text(f"acme {ACME}\numbra {UMBRA}\n")
    flags = (*LIMITS, "--api-keys-file", str(keys))
    async with started(tiny("qwen2-vl"), home, Target("float32", "engine"), *flags) as frontend:
        yield frontend


async def p95_ms(frontend: Started, seed: random.Random, requests: int = REQUESTS) -> float:
    """The 95th percentile of the latency of good requests, one after the other, each with a new image."""
    taken = []
    for _ in range(requests):
        body = chat(image(jpeg(seed, 96)), {"type": "text", "text": "What is in this picture?"})
        began = time.perf_counter()
        response = await frontend.client.post("/v1/chat/completions", content=body, headers=GOOD, timeout=60)
        taken.append(1_000 * (time.perf_counter() - began))
        assert response.status_code == 200, response.text
    return quantiles(taken, n=20)[-1]


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
async def test_beside_fifty_requests_of_another_tenant_that_are_refused_a_good_one_takes_at_most_twice_as_long(
    tiny: Folder, tmp_path: Path
) -> None:
    seed = random.Random(18)
    alone, beside = [], []
    async with two_tenants(tiny, tmp_path) as frontend:
        with attackers(frontend, "refused") as hostile:
            await p95_ms(frontend, seed)
            for _ in range(ROUNDS):
                alone.append(await p95_ms(frontend, seed))
                await asyncio.to_thread(hostile.begin)
                beside.append(await p95_ms(frontend, seed))
                await asyncio.to_thread(hostile.end)
    ratios = [theirs / mine for mine, theirs in zip(alone, beside, strict=True)]
    figures = f"p95 alone {median(alone):.1f} ms, beside {median(beside):.1f} ms, pair by pair {ratios}"
    assert {answer.split()[0] for answer in hostile.answers} >= REFUSED.keys() - {"slow"}
    assert not [answer for answer in hostile.answers if answer.endswith((" 200", " 401", " 500"))]
    assert median(ratios) <= 2, f"{figures}; {dict(hostile.answers)}"


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_beside_fifty_valid_and_dear_requests_of_another_tenant_every_good_one_is_answered_however_late(
    tiny: Folder, tmp_path: Path
) -> None:
    seed = random.Random(21)
    async with two_tenants(tiny, tmp_path) as frontend:
        with attackers(frontend, "dear") as hostile:
            await p95_ms(frontend, seed, 5)
            await asyncio.to_thread(hostile.begin)
            await p95_ms(frontend, seed, 8)  # each has to be answered with 200
            assert (await frontend.client.get("/ready")).status_code == 200
            await asyncio.to_thread(hostile.end)
        assert (await frontend.client.get("/ready")).status_code == 200
    answers = hostile.answers
    assert {answer.split()[0] for answer in answers if answer.endswith(" 200")} == DEAR.keys(), "they are valid"
    assert {answer.split()[1] for answer in answers} <= {"200", "429"}, dict(answers)


def check_a_request_waits_one_turn() -> None:
    """Beside a request with a thousand items, one with one."""
    queue: FairQueue[int] = FairQueue()
    for item in range(1_000):
        queue.add("tenant", "hostile", item)
    tenant = queue.add("tenant", "good", -1)
    assert -1 in (queue.take(tenant), queue.take(tenant))


def test_a_request_waits_for_one_item_of_another_and_not_for_all() -> None:
    check_a_request_waits_one_turn()


def test_a_mutant_that_serves_in_the_order_of_arrival_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    add = FairQueue.add
    monkeypatch.setattr(FairQueue, "add", lambda self, name, _, item: add(self, name, None, item))
    with pytest.raises(AssertionError):
        check_a_request_waits_one_turn()
