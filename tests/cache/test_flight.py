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


async def test_equal_work_in_flight_is_done_once_D3() -> None:
    flight, gate = Flight[str, int](), Gate()
    tasks = [asyncio.create_task(flight.do("a", gate.work)) for _ in range(5)]
    await settle()
    assert (gate.begun, flight.joined, len(flight)) == (1, 4, 1)
    gate.ends[0].set_result(7)
    assert await asyncio.gather(*tasks) == [7] * 5
    assert len(flight) == 0


async def test_nothing_is_remembered_D3() -> None:
    flight, gate = Flight[str, int](), Gate()
    for number in range(3):
        task = asyncio.create_task(flight.do("a", gate.work))
        await settle()
        gate.ends[number].set_result(number)
        assert await task == number
    assert (gate.begun, flight.joined) == (3, 0)


async def test_a_cancelled_leader_does_not_stop_those_who_joined_D3() -> None:
    flight, gate = Flight[str, int](), Gate()
    leader, joined = (asyncio.create_task(flight.do("a", gate.work)) for _ in range(2))
    await settle()
    leader.cancel()
    await settle()
    assert leader.cancelled()
    gate.ends[0].set_result(1)
    assert await joined == 1
    assert gate.stopped == 0


async def test_work_that_nobody_waits_for_is_stopped_and_the_next_caller_begins_anew_D3() -> None:
    flight, gate = Flight[str, int](), Gate()
    tasks = [asyncio.create_task(flight.do("a", gate.work)) for _ in range(2)]
    await settle()
    for task in tasks:
        task.cancel()
    await settle()
    assert (gate.stopped, len(flight)) == (1, 0)
    again = asyncio.create_task(flight.do("a", gate.work))
    await settle()
    gate.ends[1].set_result(2)
    assert await again == 2


async def test_an_inputs_fault_is_everyones_D3() -> None:
    flight, gate = Flight[str, int](), Gate()
    tasks = [asyncio.create_task(flight.do("a", gate.work)) for _ in range(3)]
    await settle()
    gate.ends[0].set_exception(MediaUndecodable("broken"))
    assert {type(result) for result in await asyncio.gather(*tasks, return_exceptions=True)} == {MediaUndecodable}
    assert gate.begun == 1


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


async def test_a_deadline_of_one_caller_is_its_own_D3() -> None:
    flight, gate = Flight[str, int](), Gate()

    async def hurried() -> int:
        async with asyncio.timeout(0):
            return await flight.do("a", gate.work)

    patient = asyncio.create_task(flight.do("a", gate.work))
    await settle()
    with pytest.raises(TimeoutError):
        await hurried()
    gate.ends[0].set_result(3)
    assert await patient == 3


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
