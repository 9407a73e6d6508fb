"""The order of lines that share items."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from semel.batch.lines import Line
from semel.batch.schedule import Schedule


def line(number: int, *items: int) -> Line:
    return Line(number, 0, 0, number, items)


def taken(schedule: Schedule, count: int) -> list[Line]:
    return [one for _ in range(count) if (one := schedule.take()) is not None]


def scheduled(*lines: Line) -> Schedule:
    made = Schedule()
    for one in lines:
        made.add(one)
    return made


def test_the_first_line_with_an_item_goes_alone_and_the_others_right_after_its_answer() -> None:
    schedule = scheduled(line(1, 7), line(2, 7), line(3, 8), line(4, 9), line(5, 7))
    first, second = taken(schedule, 2)
    assert (first.number, second.number) == (1, 3)
    schedule.done(first)
    assert [one.number for one in taken(schedule, 2)] == [2, 5], "before the new item of line 4"
    assert [one.number for one in taken(schedule, 2)] == [4]


def test_no_place_waits_for_an_answer_if_nothing_else_is_left() -> None:
    assert len(taken(scheduled(*(line(number, 7) for number in range(5))), 5)) == 5


def test_lines_without_items_keep_their_order() -> None:
    assert [one.number for one in taken(scheduled(line(1), line(2), line(3)), 9)] == [1, 2, 3]


@given(st.lists(st.lists(st.integers(0, 5), max_size=3, unique=True), max_size=40), st.randoms(use_true_random=False))
def test_every_line_is_taken_once_whatever_is_answered_when(items: list[list[int]], chance: object) -> None:
    schedule = scheduled(*(line(number, *some) for number, some in enumerate(items)))
    flying, seen = list[Line](), list[int]()
    while len(schedule) or flying:
        if len(flying) < 4 and (one := schedule.take()) is not None:
            flying.append(one)
            seen.append(one.number)
        elif flying:
            schedule.done(flying.pop(chance.randrange(len(flying))))  # type: ignore[attr-defined]
    assert sorted(seen) == list(range(len(items)))
