"""Turns between tenants and between requests, and places in a full queue, against slow and obvious models."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from time import thread_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.processing.pool.queue import FairQueue

Waiting = tuple[str, str, int]
TENANTS = "AB"
GROUPS = "abc"
MAX_ITEMS = 6

adds = st.tuples(st.just("add"), st.tuples(st.sampled_from(TENANTS), st.sampled_from(GROUPS)))
STEPS = st.lists(
    adds
    | adds
    | st.tuples(st.just("discard"), st.integers(0, 30))
    | st.tuples(st.sampled_from(["take", "take", "clear"]), st.none()),
    max_size=60,
)


class OneLevel(FairQueue[int]):
    """The wrong implementation: requests take turns, whosoever they are."""

    def add(self, tenant: str, group: Hashable, item: int) -> None:
        super().add("", (tenant, group), item)

    def discard(self, tenant: str, item: int) -> None:
        del tenant
        super().discard("", item)


class Model:
    """A list of all that waits, and a list of turns for the tenants and for each tenant's groups."""

    def __init__(self) -> None:
        self.tenants: list[str] = []
        self.groups: dict[str, list[str]] = {tenant: [] for tenant in TENANTS}
        self.waiting: list[Waiting] = []

    def add(self, one: Waiting) -> None:
        self.waiting.append(one)
        self.settle()

    def take(self) -> Waiting:
        tenant = self.tenants.pop(0)
        group = self.groups[tenant].pop(0)
        one = next(one for one in self.waiting if one[:2] == (tenant, group))
        self.remove(one)
        return one

    def remove(self, one: Waiting) -> None:
        self.waiting.remove(one)
        self.settle()

    def settle(self) -> None:
        """Who waits and has no turn comes last; who does not wait has none."""
        for tenant, group, _ in self.waiting:
            if tenant not in self.tenants:
                self.tenants.append(tenant)
            if group not in self.groups[tenant]:
                self.groups[tenant].append(group)
        self.tenants = [tenant for tenant in self.tenants if any(one[0] == tenant for one in self.waiting)]
        for tenant, groups in self.groups.items():
            groups[:] = [group for group in groups if any(one[:2] == (tenant, group) for one in self.waiting)]

    def yielding(self, tenant: str) -> int | None:
        """The newest item of the other tenant, if this one would not have more than half then."""
        mine = [item for its, _, item in self.waiting if its == tenant]
        others = [item for its, _, item in self.waiting if its != tenant]
        if not others or (len(mine) + 1) * 2 > MAX_ITEMS:
            return None
        return max(others)


def play(queue: FairQueue[int], steps: list[tuple[str, object]]) -> None:
    """Do the same with a queue and the model."""
    model, came = Model(), list[Waiting]()
    for name, argument in steps:
        match name, argument:
            case "add", (str(tenant), str(group)):
                one = (tenant, group, len(came))
                came.append(one)
                assert queue.is_full == (len(model.waiting) == MAX_ITEMS)
                if queue.is_full:
                    item = queue.yielding(tenant)
                    assert item == model.yielding(tenant)
                    if item is None:
                        continue
                    queue.discard(came[item][0], item)
                    model.remove(came[item])
                queue.add(*one)
                model.add(one)
            case "discard", int(item) if item < len(came):
                queue.discard(came[item][0], item)
                if came[item] in model.waiting:
                    model.remove(came[item])
            case "take", _ if model.waiting:
                assert queue.take() == model.take()[2]
            case "clear", _:
                queue.clear()
                model = Model()
        assert len(queue) == len(model.waiting) <= MAX_ITEMS
        assert sorted(queue) == sorted(item for _, _, item in model.waiting)
        assert queue.tenants == {t: n for t in TENANTS if (n := sum(one[0] == t for one in model.waiting))}
    while model.waiting:
        assert queue.take() == model.take()[2]
    assert len(queue) == 0


@given(STEPS)
def test_the_queue_does_what_the_model_does_D3(steps: list[tuple[str, object]]) -> None:
    play(FairQueue(MAX_ITEMS), steps)


def check_that_a_thousand_requests_of_a_tenant_stand_before_no_other(queue: FairQueue[int]) -> None:
    for number in range(1_000):
        queue.add("A", f"request {number}", number)
    assert queue.take() == 0  # a process is free
    queue.add("B", "request", 1_000)
    assert 1_000 in [queue.take(), queue.take()]


def test_the_first_item_of_a_tenant_is_next_but_one_behind_a_thousand_requests_of_another_S21() -> None:
    check_that_a_thousand_requests_of_a_tenant_stand_before_no_other(FairQueue())


def test_mutant_a_queue_without_tenants_lets_it_wait_for_all_of_them() -> None:
    with pytest.raises(AssertionError):
        check_that_a_thousand_requests_of_a_tenant_stand_before_no_other(OneLevel())


def check_that_a_tenant_cannot_fill_the_queue(queue: FairQueue[int]) -> None:
    """One tenant floods: the other gets its half of the places, from the newest on, and no more."""
    for number in range(100):
        queue.add("A", number, number)
    for number in range(50):
        assert queue.yielding("B") == 99 - number
        queue.discard("A", 99 - number)
        queue.add("B", number, 1_000 + number)
    assert queue.yielding("B") is None
    assert queue.yielding("A") is None
    assert queue.tenants == {"A": 50, "B": 50}
    assert queue.yielding("C") in {49, 1_049}


def test_a_tenant_cannot_fill_the_queue_for_others_S21() -> None:
    check_that_a_tenant_cannot_fill_the_queue(FairQueue(100))


def test_mutant_a_queue_without_shares_is_full_for_everybody() -> None:
    with pytest.raises(AssertionError):
        check_that_a_tenant_cannot_fill_the_queue(OneLevel(100))


def seconds(work: Callable[[], object], times: int) -> float:
    began = thread_time()
    for _ in range(times):
        work()
    return (thread_time() - began) / times


def step_s(waiting: int) -> float:
    """What it takes to let one item wait, one be taken, and one yield, while so many wait."""
    queue: FairQueue[object] = FairQueue(waiting)
    for number in range(waiting):
        queue.add("A", number // 2, number)

    def step() -> None:
        queue.take()
        queue.add("A", item := object(), item)
        newest = queue.yielding("B")
        assert newest is item
        queue.discard("A", newest)
        queue.add("A", item, item)

    return min(seconds(step, 200) for _ in range(7))


def test_a_step_takes_as_long_with_a_hundred_thousand_items_as_with_a_hundred_D3() -> None:
    assert step_s(100_000) < 10 * step_s(100)
