"""Turns between tenants and between requests, in figures; in any order of calls they are in `test_machine.py`."""

from __future__ import annotations

from semel.fairness.queue import FairQueue
from tests.operations import operations


def taken(queue: FairQueue[int], count: int) -> list[int]:
    """So many items, in their order, where each costs nothing."""
    items = []
    for _ in range(count):
        tenant = queue.first()
        assert tenant is not None
        items.append(queue.take(tenant))
    return items


def test_a_request_with_one_item_waits_for_one_of_two_hundred_D3() -> None:
    queue: FairQueue[int] = FairQueue()
    for index in range(200):
        queue.add("", "many", index)
    queue.add("", "one", 1_000)
    assert taken(queue, 3) == [0, 1_000, 1]


def cost_of_a_step(waiting: int) -> int:
    """The operations to let one item wait, one be taken, and one yield, while so many wait."""
    queue: FairQueue[int] = FairQueue(waiting)
    for number in range(waiting):
        queue.add("A", number // 2, number)

    def step() -> None:
        taken(queue, 1)
        queue.add("A", -1, -1)
        assert queue.yielding("B") == -1
        queue.discard("A", -1)

    return operations(step)


def test_a_step_costs_as_much_with_ten_thousand_items_as_with_a_hundred_D3() -> None:
    assert cost_of_a_step(10_000) == cost_of_a_step(100)


def test_nothing_is_kept_of_tenants_and_requests_that_have_gone() -> None:
    clock = [0.0]
    queue: FairQueue[int] = FairQueue(now=lambda: clock[0])
    for number in range(100):
        queue.add(f"tenant {number}", number, number)
    for number in range(0, 100, 2):
        queue.discard(f"tenant {number}", number)
    assert sorted(taken(queue, 50)) == list(range(1, 100, 2))
    clock[0] = 601.0
    last = queue.add("one more", 0, 0)
    assert ([*queue._tenants], [*queue.places]) == (["one more"], ["one more"])
    assert [entry[2] for entry in queue._heap] == [last]


def test_a_slot_that_a_tenants_item_has_broken_is_its_own_while_others_are_about_S6() -> None:
    queue: FairQueue[int] = FairQueue()
    tenant = queue.add("mallory", 0, 0)
    tenant.lost = 1
    assert queue.next_for(1) is tenant
    queue.add("alice", 1, 1)
    queue.discard("alice", 1)
    assert queue.next_for(2) is None
    tenant.lost = 0
    assert queue.next_for(2) is tenant
