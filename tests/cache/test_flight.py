"""One computation per key, whoever comes, goes or fails."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.cache import Flight
from semel.errors import MediaUndecodable, ServiceError
from tests.effort import examples


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)


class Gate:
    """Work that ends when it is told to, and counts how often it was begun and stopped."""

    def __init__(self) -> None:
        self.begun = self.stopped = 0
        self.ends: list[asyncio.Future[int]] = []

    async def work(self) -> int:
        self.begun += 1
        self.ends.append(asyncio.get_running_loop().create_future())
        try:
            return await self.ends[-1]
        except asyncio.CancelledError:
            self.stopped += 1
            raise


@pytest.mark.parametrize(
    "failure", [ServiceError("a process died"), asyncio.CancelledError()], ids=["error", "cancelled"]
)
async def test_another_failure_is_the_leaders_alone_and_one_of_the_others_leads_D3(failure: BaseException) -> None:
    flight, gate = Flight[str, int](), Gate()
    tasks = [asyncio.create_task(flight.do("a", gate.work)) for _ in range(3)]
    await settle()
    gate.ends[0].set_exception(failure) if isinstance(failure, Exception) else gate.ends[0].cancel()
    await settle()
    assert (gate.begun, flight.joined) == (2, 2)
    gate.ends[1].set_result(5)
    first, *others = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(first, type(failure))
    assert others == [5, 5]


OUTCOMES = st.sampled_from(["result", "input", "service"])
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("call"), st.integers(0, 1), OUTCOMES),
        st.tuples(st.just("cancel"), st.integers(0, 30), st.just("")),
        st.tuples(st.just("end"), st.integers(0, 30), st.just("")),
    ),
    max_size=30,
)


class Caller:
    """One call, its own work, and what became of it."""

    def __init__(self, flight: Flight[int, str], key: int, outcome: str) -> None:
        self.key, self.outcome = key, outcome
        self.end: asyncio.Future[None] | None = None
        self.cancelled = False
        self.task = asyncio.create_task(flight.do(key, self.work))

    async def work(self) -> str:
        self.end = asyncio.get_running_loop().create_future()
        await self.end
        if self.outcome == "service":
            raise ServiceError("mine")
        if self.outcome == "input":
            raise MediaUndecodable("everyone's")
        return f"key {self.key}"

    @property
    def is_working(self) -> bool:
        return self.end is not None and not self.end.done()


async def check_flight(acts: list[tuple[str, int, str]]) -> None:
    flight = Flight[int, str]()
    callers: list[Caller] = []
    for act, number, outcome in acts:
        if act == "call":
            callers.append(Caller(flight, number, outcome))
        elif callers:
            caller = callers[number % len(callers)]
            if act == "cancel":
                caller.cancelled |= caller.task.cancel()
            elif caller.is_working and caller.end is not None:
                caller.end.set_result(None)
        await settle()
        working = [caller.key for caller in callers if caller.is_working]
        assert sorted(working) == sorted(set(working)), "equal work was done twice at once"
        assert len(flight) == len(working)
        waiting = {caller.key for caller in callers if not caller.task.done()}
        assert waiting == set(working), "somebody waits for nothing, or nobody for something"
    while working_now := [caller for caller in callers if caller.is_working]:
        for caller in working_now:
            assert caller.end is not None
            caller.end.set_result(None)
        await settle()
    for caller in callers:
        check_end(caller, callers)


def check_end(caller: Caller, callers: list[Caller]) -> None:
    assert caller.task.done()
    if caller.task.cancelled():
        assert caller.cancelled
        return
    error = caller.task.exception()
    if error is None:
        assert caller.task.result() == f"key {caller.key}"
    elif isinstance(error, ServiceError):
        assert caller.outcome == "service", "failed by another's work"
        assert caller.end is not None
    else:
        assert any(other.key == caller.key and other.outcome == "input" for other in callers)


@settings(deadline=None, max_examples=examples(200))
@given(ACTS)
def test_a_caller_fails_only_by_its_own_work_or_by_its_input_D3(acts: list[tuple[str, int, str]]) -> None:
    asyncio.run(check_flight(acts))
