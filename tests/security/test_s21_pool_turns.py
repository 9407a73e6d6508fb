"""S21: tenants take turns for the preprocessing processes, over a real socket and with real processes.

When only requests took turns, all 55 that were before the other tenant's were answered first.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.conftest import Folder
from tests.frontend.test_start import Started
from tests.security.test_s18_fairness import ACME, UMBRA, two_tenants
from tests.waiting import until
from tools.security.hostile import chat, image, jpeg

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
async def test_a_request_waits_for_a_turn_of_another_tenant_and_not_for_its_sixty_requests(
    tiny: Folder, tmp_path: Path
) -> None:
    async with two_tenants(tiny, tmp_path) as frontend:
        assert await answered_meanwhile(frontend) <= TURNS
