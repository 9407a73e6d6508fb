"""The cells of a tenant, held to a slow model; the wrong ways fail where they should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.cells.placement import Cell, home_cells

NAMES = [f"cell-{number}" for number in range(12)]
TENANTS = [f"tenant-{number}" for number in range(400)]

weights = st.integers(1, 9)
fleets = st.lists(st.sampled_from(NAMES), min_size=1, max_size=8, unique=True).flatmap(
    lambda names: st.lists(weights, min_size=len(names), max_size=len(names)).map(
        lambda drawn: tuple(Cell(name, (), weight=weight) for name, weight in zip(names, drawn, strict=True))
    )
)
names = st.text(max_size=20)


def _hashed(*parts: bytes) -> bytes:
    joined = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return blake2b(joined, digest_size=32).digest()


def _model_order(key: bytes, cells: Sequence[Cell]) -> list[Cell]:
    """Write all tickets of all cells down, the best first, and read off each cell where it stands first."""
    tickets = [
        (blake2b(f"{cell.name}/{number}".encode(), key=key, digest_size=8).digest(), cell.name, cell)
        for cell in cells
        for number in range(cell.weight)
    ]
    tickets.sort(key=lambda ticket: ticket[:2], reverse=True)
    found: list[Cell] = []
    for _, _, cell in tickets:
        if cell not in found:
            found.append(cell)
    return found


@given(names, fleets, st.integers(1, 8))
def test_they_are_the_cells_of_the_model(tenant: str, cells: tuple[Cell, ...], weight: int) -> None:
    model = _model_order(_hashed(b"semel tenant", tenant.encode()), cells)
    assert list(home_cells(tenant, cells, weight)) == model[:weight]


Choice = Callable[[str, tuple[Cell, ...]], Cell]


def _rendezvous(tenant: str, cells: tuple[Cell, ...]) -> Cell:
    return home_cells(tenant, cells)[0]


def _modulo(tenant: str, cells: tuple[Cell, ...]) -> Cell:
    """A mutant: the hash modulo the number of cells."""
    return cells[int.from_bytes(_hashed(tenant.encode())[:8], "little") % len(cells)]


def _unweighted(tenant: str, cells: tuple[Cell, ...]) -> Cell:
    """A mutant: every cell has one ticket."""
    return _rendezvous(tenant, tuple(Cell(cell.name, ()) for cell in cells))


def _moved_wrongly(
    choose: Choice, before: tuple[Cell, ...], after: tuple[Cell, ...], changed: str, count: int = len(TENANTS)
) -> int:
    """Tenants that another cell has now, though neither is the one that came, went or changed."""
    pairs = [(choose(tenant, before).name, choose(tenant, after).name) for tenant in TENANTS[:count]]
    return sum(one != other and changed not in (one, other) for one, other in pairs)


@given(fleets, st.data())
def test_a_cell_that_comes_or_changes_its_weight_moves_only_what_it_wins_or_had(
    cells: tuple[Cell, ...], data: st.DataObject
) -> None:
    changed = data.draw(st.sampled_from(cells))
    others = tuple(cell for cell in cells if cell != changed)
    if others:
        assert _moved_wrongly(_rendezvous, cells, others, changed.name, 40) == 0
    heavier = Cell(changed.name, (), weight=changed.weight + 1)
    assert _moved_wrongly(_rendezvous, cells, (*others, heavier), changed.name, 40) == 0


def test_the_hash_modulo_the_number_of_cells_moves_others_too() -> None:
    cells = tuple(Cell(name, ()) for name in NAMES[:4])
    assert _moved_wrongly(_modulo, cells, cells[1:], NAMES[0]) > 100
    assert _moved_wrongly(_rendezvous, cells, cells[1:], NAMES[0]) == 0


@pytest.mark.parametrize(("choose", "is_right"), [(_rendezvous, True), (_unweighted, False)])
def test_a_cell_of_weight_three_has_three_times_the_tenants(choose: Choice, is_right: bool) -> None:
    cells = (Cell("light", ()), Cell("heavy", (), weight=3))
    found = Counter(choose(tenant, cells).name for tenant in TENANTS)
    assert (2.2 < found["heavy"] / found["light"] < 4.0) == is_right, found
