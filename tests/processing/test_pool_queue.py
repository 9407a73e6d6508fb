"""Turns between requests, against a slow and obvious model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from semel.processing.pool.queue import FairQueue

GROUPS = st.sampled_from("abcd")
STEPS = st.lists(
    st.tuples(st.just("add"), GROUPS)
    | st.tuples(st.just("discard"), st.integers(0, 30))
    | st.tuples(st.sampled_from(["take", "put back", "clear"]), st.none()),
    max_size=60,
)


class Model:
    """Whoever waits and has had the fewest turns since it came is next; a list of groups, in the order of turns."""

    def __init__(self) -> None:
        self.turns: list[str] = []
        self.waiting: list[tuple[str, int]] = []

    def add(self, group: str, item: int) -> None:
        if group not in self.turns:
            self.turns.append(group)
        self.waiting.append((group, item))

    def take(self) -> tuple[str, int]:
        group = self.turns.pop(0)
        taken = next(pair for pair in self.waiting if pair[0] == group)
        self.remove(taken)
        if any(pair[0] == group for pair in self.waiting):
            self.turns.append(group)
        return taken

    def put_back(self, taken: tuple[str, int]) -> None:
        if taken[0] in self.turns:
            self.turns.remove(taken[0])
        self.turns.insert(0, taken[0])
        self.waiting.insert(0, taken)

    def remove(self, pair: tuple[str, int]) -> None:
        self.waiting.remove(pair)
        if pair[0] in self.turns and not any(other[0] == pair[0] for other in self.waiting):
            self.turns.remove(pair[0])


@given(STEPS)
def test_the_queue_does_what_the_model_does_D3(steps: list[tuple[str, str | int | None]]) -> None:
    queue: FairQueue[int] = FairQueue()
    model = Model()
    groups: list[str] = []
    taken: tuple[str, int] | None = None
    for name, argument in steps:
        match name, argument:
            case "add", str(group):
                queue.add(group, len(groups))
                model.add(group, len(groups))
                groups.append(group)
            case "discard", int(item) if item < len(groups):
                queue.discard(groups[item], item)
                if (groups[item], item) in model.waiting:
                    model.remove((groups[item], item))
            case "take", _ if model.waiting:
                taken = model.take()
                assert queue.take() == taken[1]
            case "put back", _ if taken is not None:
                queue.put_back(*taken)
                model.put_back(taken)
                taken = None
            case "clear", _:
                queue.clear()
                model = Model()
        assert len(queue) == len(model.waiting)
        assert sorted(queue) == sorted(item for _, item in model.waiting)
    while model.waiting:
        assert queue.take() == model.take()[1]
    assert len(queue) == 0


@given(st.lists(st.integers(1, 40), min_size=2, max_size=6))
def test_between_two_items_of_a_request_every_other_that_waits_has_one_turn_D3(sizes: list[int]) -> None:
    queue: FairQueue[tuple[int, int]] = FairQueue()
    for group, size in enumerate(sizes):
        for index in range(size):
            queue.add(group, (group, index))
    order = [queue.take() for _ in range(len(queue))]
    assert order == sorted(order, key=lambda item: (item[1], item[0]))


def test_a_request_with_one_item_waits_for_one_of_two_hundred_D3() -> None:
    queue: FairQueue[str] = FairQueue()
    for index in range(200):
        queue.add("many", f"many {index}")
    queue.add("one", "one")
    assert [queue.take(), queue.take(), queue.take()] == ["many 0", "one", "many 1"]
