"""What a night runs first, and its page."""

from __future__ import annotations

from tools.nightly import Row, Step, ordered, read, steps, written

FIRST, SECOND, THIRD = (Step(name, f"run {name}", 1) for name in ("first", "second", "third"))
ROWS = {
    "first": Row("first", "run first", "2026-11-18", "abc1234", 3.5, "green"),
    "second": Row("second", "run second", "2026-11-17", "abc1234", 1.0, "green"),
}


def test_what_was_never_run_is_first_and_then_what_was_run_longest_ago() -> None:
    assert ordered([FIRST, SECOND, THIRD], ROWS) == [THIRD, SECOND, FIRST]


def test_what_is_not_green_is_run_again_first() -> None:
    rows = {**ROWS, "first": Row("first", "run first", "2026-11-18", "abc1234", 3.5, "failed (1)")}
    assert ordered([FIRST, SECOND, THIRD], rows) == [FIRST, THIRD, SECOND]


def test_a_page_is_read_as_it_was_written_without_steps_that_are_gone() -> None:
    page = written(ROWS, [SECOND, FIRST, THIRD])
    assert read(page) == ROWS
    assert "Not run yet: third." in page
    assert read(written(ROWS, [FIRST])) == {"first": ROWS["first"]}


def test_every_step_has_a_name_of_its_own() -> None:
    names = [step.name for step in steps(["tests/a.py"])]
    assert len(set(names)) == len(names)
    assert names[0] == "tests/a.py"
