"""The page between an engine core and the process that embeds it: events, leases, epochs. No engine, no vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from semel.core import Digest
from semel.engine.tier_events import Gone, Overrun, Reset, Saved, TierEvent
from semel.engine.vllm.tier.page import LEASE_SLOTS, TierPage

RING = 4_096
FORM = (7, 128, "torch.bfloat16")


def digest(number: int) -> Digest:
    return Digest(number.to_bytes(32, "big"))


def saved(number: int) -> Saved:
    """One whose every part says which it is: half of another would be seen."""
    return Saved(digest(number), number, ((number, 1), (2 * number, 3)), (number, 2 * number, "torch.float32"))


def write(page: TierPage, event: TierEvent) -> None:
    match event:
        case Saved():
            page.saved(event.digest, event.transfer, event.extents, event.form)
        case Gone():
            page.gone(event.digest, event.transfer)
        case Reset():
            page.reset(new_weights=event.new_weights)


SCRIPT: list[TierEvent] = [saved(1), saved(2), Gone(digest(1), 1), Reset(new_weights=False), saved(3), Reset(True)]


def test_events_are_read_in_order_by_another_opening_of_the_page() -> None:
    page = TierPage.create()
    reader = TierPage.open(page.path)
    assert reader.read(0) == ([], 0)
    for event in SCRIPT:
        write(page, event)
    events, position = reader.read(0)
    assert events == SCRIPT
    assert reader.read(position) == ([], position)
    assert (reader.epoch, reader.has_new_weights) == (2, True)


def test_who_falls_behind_is_told_and_goes_on_from_there() -> None:
    page = TierPage.create()
    for number in range(RING + 1):
        page.gone(digest(number), number)
    assert page.read(0) == ([Overrun()], RING + 1)
    events, _ = page.read(1)
    assert events == [Gone(digest(number), number) for number in range(1, RING + 1)], "the control: just in time"
    page.gone(digest(5), 5)
    assert page.read(RING + 1) == ([Gone(digest(5), 5)], RING + 2)


def test_a_record_that_is_overwritten_while_it_is_read_is_an_overrun() -> None:
    page = TierPage.create()
    write(page, saved(1))

    class Racing:
        """The writer comes round while the reader is inside of the record."""

        def __init__(self, cells: Any) -> None:
            self.cells = cells

        def __getitem__(self, key: Any) -> Any:
            found = self.cells[key]
            if isinstance(key, slice):
                page._cells = self.cells
                for number in range(RING):
                    write(page, saved(2 + number))
            return found

    page._cells = Racing(page._cells)  # type: ignore[assignment]
    events, _ = page.read(0)
    assert events == [Overrun()]


class KilledError(Exception):
    """The writer's process ends."""


class Mortal:
    """Cells that are written only so often."""

    def __init__(self, cells: Any, writes: int) -> None:
        self.cells, self.left = cells, writes

    def __getitem__(self, key: Any) -> Any:
        return self.cells[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        if not self.left:
            raise KilledError
        self.left -= 1
        self.cells[key] = value


def run_until_killed(writes: int, write: Callable[[TierPage, TierEvent], None]) -> tuple[TierPage, bool]:
    page = TierPage.create()
    cells = page._cells
    page._cells = Mortal(cells, writes)  # type: ignore[assignment]
    try:
        for event in SCRIPT:
            write(page, event)
    except KilledError:
        return page, True
    finally:
        page._cells = cells
    return page, False


def false_records(write: Callable[[TierPage, TierEvent], None]) -> int:
    """How often a writer that was killed somewhere has left something that was not said."""
    wrong = 0
    for writes in range(1_000):
        page, was_killed = run_until_killed(writes, write)
        events, _ = page.read(0)
        resets = sum(isinstance(event, Reset) for event in events)
        wrong += events != SCRIPT[: len(events)] or page.epoch not in (resets, resets + 1)
        page.close()
        if not was_killed:
            return wrong
    raise AssertionError("the script does not end")


def test_a_writer_that_is_killed_anywhere_leaves_no_false_record() -> None:
    assert false_records(write) == 0


def test_mutant_a_head_that_moves_first_leaves_false_records(monkeypatch: pytest.MonkeyPatch) -> None:
    def head_first(self: TierPage, values: Any) -> None:
        from semel.engine.vllm.tier import page as tier_page

        number = self._cells[0]
        self._cells[0] = number + 1
        start = tier_page._RING + number % RING * tier_page._CELLS
        self._cells[start] = 2 * number + 2
        for cell, value in enumerate(values, start + 1):
            self._cells[cell] = value

    monkeypatch.setattr(TierPage, "_write", head_first)

    def harmless(page: TierPage, event: TierEvent) -> None:
        try:
            write(page, event)
        except KilledError:
            if page._cells[0] != 1:  # a first record of zeros is not even one
                raise
            page._cells.cells[0] = 0  # type: ignore[attr-defined]
            raise

    assert false_records(harmless) > 0


def test_a_lease_is_done_in_its_own_generation_only_and_never_forgotten() -> None:
    page = TierPage.create()
    first, second = LEASE_SLOTS + 3, 2 * LEASE_SLOTS + 3
    page.use(first)
    assert (page.is_used(first), page.is_done(first), page.is_used(second)) == (True, False, False)
    page.finish(first)
    for number in range(2 * RING):
        page.gone(digest(number), number)
    assert (page.is_done(first), page.is_done(second)) == (True, False)


def test_an_output_in_very_many_pieces_is_not_told_of() -> None:
    page = TierPage.create()
    page.saved(digest(1), 1, tuple((2 * number, 1) for number in range(25)), FORM)
    assert page.read(0) == ([], 0)
    page.saved(digest(1), 1, tuple((2 * number, 1) for number in range(24)), FORM)  # the control
    assert len(page.read(0)[0]) == 1
