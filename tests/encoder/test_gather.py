"""Gathering: which embeddings a step takes, and where."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from semel.core import Mask, Placeholder, Timeline
from semel.encoder.gather import Gathered, gather


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    placeholders, position = [], 0
    for gap, bits, is_masked in draw(
        st.lists(st.tuples(st.integers(0, 3), st.lists(st.booleans(), min_size=1, max_size=6), st.booleans()))
    ):
        placeholders.append(Placeholder(position + gap, len(bits), Mask(bits) if is_masked else None))
        position += gap + len(bits)
    return Timeline.decoder(placeholders)


@given(timelines(), st.integers(0, 40), st.integers(0, 20))
def test_c5_every_position_takes_the_embedding_that_belongs_to_it(timeline: Timeline, start: int, length: int) -> None:
    filled: dict[int, tuple[int, int]] = {}
    for index, placeholder in enumerate(timeline):
        bits = [1] * placeholder.length if placeholder.mask is None else placeholder.mask.bits
        positions = [placeholder.offset + place for place, bit in enumerate(bits) if bit]
        filled.update({position: (index, order) for order, position in enumerate(positions)})
    gathered = gather(timeline, start, start + length)
    taken = [(piece.index, order) for piece in gathered.slices for order in range(piece.start, piece.end)]
    positions = [start + place for place, bit in enumerate(gathered.mask) if bit]
    assert dict(zip(positions, taken, strict=True)) == {
        position: item for position, item in filled.items() if start <= position < start + length
    }


def test_c5_an_encoder_timeline_has_nothing_to_gather() -> None:
    assert gather(Timeline.encoder([Placeholder(0, 4)]), 0, 2) == Gathered((), bytes(2))
