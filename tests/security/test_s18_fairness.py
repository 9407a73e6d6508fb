"""S18: the requests of one tenant beside fifty of another at a time.

Real processes: a frontend with two preprocessing processes, an engine that answers at once, and the hostile clients,
who have a key of their own. Beside their valid and expensive requests a good one is answered, and the frontend stays
ready; how late it is answered has no bound here. For preprocessing it has one (S21): when only requests took turns,
all 55 that were before the other tenant's were answered first.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from semel.core import Target
from semel.fairness.queue import FairQueue
from tests.conftest import Folder
from tests.frontend.test_start import Started, started
from tests.waiting import until
from tools.security.hostile import EXPENSIVE, REFUSED, chat, image, jpeg

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


async def ask(frontend: Started, seed: random.Random, requests: int) -> None:
    """Good requests, one after the other, each with a new image; each has to be answered."""
    for _ in range(requests):
        body = chat(image(jpeg(seed, 96)), {"type": "text", "text": "What is in this picture?"})
        response = await frontend.client.post("/v1/chat/completions", content=body, headers=GOOD, timeout=60)
        assert response.status_code == 200, response.text


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["expensive", pytest.param("refused", marks=pytest.mark.nightly)])
async def test_beside_fifty_requests_of_another_tenant_every_good_one_is_answered_however_late(
    tiny: Folder, tmp_path: Path, kind: str
) -> None:
    seed = random.Random(21)
    async with two_tenants(tiny, tmp_path) as frontend:
        with attackers(frontend, kind) as hostile:
            await ask(frontend, seed, 5)
            await asyncio.to_thread(hostile.begin)
            await ask(frontend, seed, 8 if kind == "expensive" else 100)
            assert (await frontend.client.get("/ready")).status_code == 200
            await asyncio.to_thread(hostile.end)
        assert (await frontend.client.get("/ready")).status_code == 200
    answers = hostile.answers
    if kind == "expensive":
        assert {answer.split()[0] for answer in answers if answer.endswith(" 200")} == EXPENSIVE.keys(), (
            "they are valid"
        )
        assert {answer.split()[1] for answer in answers} <= {"200", "429"}, dict(answers)
    else:
        assert {answer.split()[0] for answer in answers} >= REFUSED.keys() - {"slow"}
        assert not [answer for answer in answers if answer.endswith((" 200", " 401", " 500"))]


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


FLOOD = 60
SIDE = 900
TURNS = 12
"""What may be answered meanwhile: what two processes work on, a turn each, and what was on its way back."""


async def answered_meanwhile(frontend: Started) -> int:
    """How many of one tenant's requests are answered while another's waits, which came behind all of them."""
    seed, answered = random.Random(21), list[int]()

    async def ask(key: str, side: int) -> None:
        body = chat(image(jpeg(seed, side)), {"type": "text", "text": "What is in this picture?"})
        headers = {"authorization": f"Bearer {key}"}
        response = await frontend.client.post("/v1/chat/completions", content=body, headers=headers, timeout=120)
        assert response.status_code == 200, response.text
        answered.append(side)

    async with asyncio.TaskGroup() as requests:
        for _ in range(FLOOD):
            requests.create_task(ask(UMBRA, SIDE))
        await until(lambda: len(answered) >= 5, within_s=60)
        before = len(answered)
        await ask(ACME, 64)
        meanwhile = len(answered) - before
        assert before + meanwhile < FLOOD, "the others still wait"
    return meanwhile


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
async def test_a_request_waits_for_a_turn_of_another_tenant_and_not_for_its_sixty_requests_S21(
    tiny: Folder, tmp_path: Path
) -> None:
    async with two_tenants(tiny, tmp_path) as frontend:
        assert await answered_meanwhile(frontend) <= TURNS
