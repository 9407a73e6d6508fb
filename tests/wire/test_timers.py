"""Deadlines in a heap, held against a table of times that is searched from end to end."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.wire.liveness import Timers

Step = tuple[str, int, float]
steps = st.lists(
    st.tuples(st.sampled_from(["set", "set", "set", "discard", "pop"]), st.integers(0, 5), st.integers(-1, 9)),
    max_size=60,
)


def differs(timers: Timers[int], taken: list[tuple[str, int, int]]) -> bool:
    """Whether it tells anything else than a table does."""
    table: dict[int, float] = {}
    for step, key, when in taken:
        if step == "set":
            timers.set(key, when)
            table[key] = when
        elif step == "discard":
            timers.discard(key)
            table.pop(key, None)
        else:
            due = {one for one, at in table.items() if at <= when}
            popped = timers.pop_due(when)
            if set(popped) != due or [table[one] for one in popped] != sorted(table[one] for one in popped):
                return True
            table = {one: at for one, at in table.items() if one not in due}
        if (len(timers), timers.next) != (len(table), min(table.values(), default=inf)):
            return True
    return False


@given(steps)
def test_a_heap_tells_what_a_table_tells(taken: list[tuple[str, int, int]]) -> None:
    assert not differs(Timers(), taken)


def _never_stale(self: Timers[int], entry: tuple[float, int, int]) -> bool:
    return entry[2] not in self._times


def _only_earlier(self: Timers[int], key: int, when: float) -> None:
    if when < self._times.get(key, inf):
        Timers.__dict__["set"](self, key, when)


@pytest.mark.parametrize(("name", "mutant"), [("_is_stale", _never_stale), ("set", _only_earlier)])
def test_mutants_differ(name: str, mutant: Callable[..., object]) -> None:
    """Times that were replaced ring on; a time that is put off is not."""
    kind = type("Mutant", (Timers,), {name: mutant})
    taken = [("set", 1, 2), ("set", 1, 5), ("pop", 0, 3), ("pop", 0, 9)]
    assert differs(kind(), taken)
    assert not differs(Timers(), taken)


def test_times_that_are_put_off_again_and_again_take_no_room() -> None:
    timers: Timers[int] = Timers()
    for number in range(10_000):
        timers.set(number % 7, float(number))
    assert len(timers._heap) < 100
    assert len(timers.pop_due(inf)) == 7
