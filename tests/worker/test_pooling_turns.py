"""Turns at an engine that pools: there are no steps of decoding, so tenants share it by the tokens of prompts (S21)."""

from __future__ import annotations

import asyncio
from collections import Counter, deque

import pytest

from semel.core import Output, PoolingOutput, Prompt, Submission, Tenant, Timeline
from semel.fairness.turns import EngineWindow, Turn
from semel.worker.turns import EngineTurns

WINDOW = EngineWindow(sequences=16, step_tokens=1_000)
POOLED = Output(0, "", (), finish_reason="stop", pooling=PoolingOutput((1,), bytes(4)))


def submission(tenant: str, tokens: int, number: int) -> Submission:
    prompt = Prompt((1,) * tokens, Timeline.decoder(()), ())
    salt = Tenant(tenant).prefix_salt
    return Submission(f"{tenant}-{number}", prompt, {}, {"task": "embed"}, cache_salt=salt)


class Pooled:
    """An engine that pools one prompt after the other, in the order of their turns."""

    def __init__(self) -> None:
        self.turns = EngineTurns(WINDOW)
        self.entered: deque[tuple[str, int, Turn]] = deque()
        self.tasks: list[asyncio.Task[None]] = []

    def send(self, tenant: str, tokens: int, count: int) -> None:
        async def take(number: int) -> None:
            turn = await self.turns.take(submission(tenant, tokens, number))
            self.entered.append((tenant, tokens, turn))

        self.tasks += [asyncio.create_task(take(number)) for number in range(count)]

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def step(self) -> tuple[str, int]:
        await self.settle()
        tenant, tokens, turn = self.entered.popleft()
        self.turns.count(turn, POOLED)
        self.turns.release(turn)
        return tenant, tokens


async def test_a_tenant_with_few_prompts_does_not_wait_for_another_s_thousands_S21() -> None:
    engine = Pooled()
    engine.send("many", 200, 3_000)
    for _ in range(50):
        assert (await engine.step())[0] == "many"
    engine.send("few", 10, 1)
    order = [(await engine.step())[0] for _ in range(40)]
    assert order.index("few") <= WINDOW.sequences + WINDOW.ends(1), "only those that the engine had already"
    for task in engine.tasks:
        task.cancel()
    await asyncio.gather(*engine.tasks, return_exceptions=True)


@pytest.mark.parametrize(("long", "short"), [(400, 20), (100, 100)])
async def test_tenants_share_an_engine_by_the_tokens_of_their_prompts_S21(long: int, short: int) -> None:
    engine = Pooled()
    engine.send("long", long, 2_000)
    engine.send("short", short, 2_500)
    had: Counter[str] = Counter()
    for number in range(2_000):
        tenant, tokens = await engine.step()
        had[tenant] += tokens * (number >= 600)  # the first one had a window of prompts before the other came
    assert had["long"] == pytest.approx(had["short"], rel=0.25)
    for task in engine.tasks:
        task.cancel()
    await asyncio.gather(*engine.tasks, return_exceptions=True)
