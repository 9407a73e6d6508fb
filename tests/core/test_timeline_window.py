"""Windows of timelines, however their placeholders are spread."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from semel.core import Placeholder, Timeline

GAPS = st.one_of(st.integers(0, 3), st.integers(0, 100_000))


@given(st.lists(st.tuples(GAPS, st.integers(1, 50)), max_size=80), st.data())
def test_a5_a_window_has_exactly_the_placeholders_that_overlap_it(
    spread: list[tuple[int, int]], data: st.DataObject
) -> None:
    placeholders, position = [], 0
    for gap, length in spread:
        placeholders.append(Placeholder(position + gap, length))
        position += gap + length
    timeline = Timeline.decoder(placeholders)
    edges = [0, position, *(edge for p in placeholders for edge in (p.offset, p.end))]
    near = st.builds(lambda edge, step: max(0, edge + step), st.sampled_from(edges), st.integers(-2, 2))
    start = data.draw(near)
    end = start + data.draw(st.integers(1, 200))
    lo, hi = timeline.window(start, end)
    assert list(range(lo, hi)) == [i for i, p in enumerate(timeline) if p.offset < end and start < p.end]
    assert lo == sum(p.end <= start for p in timeline)


def test_a5_a_placeholder_far_away_costs_no_memory() -> None:
    timeline = Timeline.decoder([Placeholder(0, 1), Placeholder(10**15, 1)])
    assert timeline.window(5, 10**15 + 1) == (1, 2)
    assert timeline.window(10**15 + 1, 10**15 + 2) == (2, 2)
    assert sum(len(table) for table in (timeline._ends_before, timeline._offsets_before)) < 100
