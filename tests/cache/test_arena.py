"""The arena against a slow obvious model: one flag per 64 bytes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from semel.cache.shared.arena import ALIGNMENT, Arena

UNITS = 40
STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 12 * ALIGNMENT), st.integers(0, 1_000)), max_size=120)


class SlowArena:
    """One flag per unit."""

    def __init__(self) -> None:
        self.taken = [False] * UNITS

    def runs(self) -> list[tuple[int, int]]:
        """The free runs, as (units, first unit)."""
        runs: list[tuple[int, int]] = []
        start: int | None = None
        for place, taken in enumerate([*self.taken, True]):
            if taken and start is not None:
                runs.append((place - start, start))
                start = None
            elif not taken and start is None:
                start = place
        return runs

    def mark(self, offset: int, units: int, *, taken: bool) -> None:
        places = range(offset // ALIGNMENT, offset // ALIGNMENT + units)
        assert {self.taken[place] for place in places} == {not taken}, "ranges overlap"
        for place in places:
            self.taken[place] = taken


@settings(deadline=None)
@given(STEPS, st.integers(0, ALIGNMENT - 1))
def test_ranges_never_overlap_and_free_neighbours_are_one_D4(steps: list[tuple[bool, int, int]], rest: int) -> None:
    arena, slow = Arena(UNITS * ALIGNMENT + rest), SlowArena()
    out: list[tuple[int, int]] = []
    for allocates, nbytes, pick in steps:
        if allocates:
            units = max(-(-nbytes // ALIGNMENT), 1)
            fitting = [run for run in slow.runs() if run[0] >= units]
            offset = arena.allocate(nbytes)
            assert offset == (min(fitting)[1] * ALIGNMENT if fitting else None)
            if offset is not None:
                slow.mark(offset, units, taken=True)
                out.append((offset, units))
        elif out:
            offset, units = out.pop(pick % len(out))
            arena.free(offset)
            slow.mark(offset, units, taken=False)
        assert arena.used == sum(slow.taken) * ALIGNMENT
        assert [size // ALIGNMENT for size, _ in arena._sizes] == sorted(units for units, _ in slow.runs())
        kept = SlowArena()
        for offset, units in out[::2]:
            kept.mark(offset, units, taken=True)
        expected = max((units for units, _ in kept.runs()), default=0) * ALIGNMENT
        assert arena.largest_gap_between(offset for offset, _ in out[::2]) == expected
    for offset, _ in out:
        arena.free(offset)
    assert arena.allocate(arena.size) == 0


def test_nothing_is_found_in_nothing_D4() -> None:
    assert Arena(ALIGNMENT - 1).allocate(0) is None
