"""Prompts on their way to a pool process and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core import Assembly, Layout, Mask
from semel.errors import ProtocolError
from semel.processing.pool.prompts import decode_prompt, encode_prompt, payload_of_assembly, to_assembled, to_assembly

token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=20)
layouts = st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=20).map(
    lambda pairs: Layout(tuple(token for token, _ in pairs), Mask(bit for _, bit in pairs))
)
items = st.lists(st.tuples(st.sampled_from(["image", "audio", "video"]), layouts), max_size=5)


@given(token_ids, st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=5))
def test_an_assembled_prompt_arrives_as_it_was(ids: list[int], places: list[tuple[int, int]]) -> None:
    assembly = Assembly(ids, places)
    assembled, payload = to_assembled(3, assembly), payload_of_assembly(assembly)
    assert assembled.payload_bytes == len(payload)
    assert to_assembly(assembled, memoryview(payload)) == assembly


def test_a_layout_that_items_share_travels_once_and_a_run_costs_nothing() -> None:
    image = Layout((7,) * 4_096)
    one, many = encode_prompt([1], [("image", image)]), encode_prompt([1], [("image", image)] * 50)
    assert len(one) < 64
    assert len(many) < len(one) + 50 * 10


@pytest.mark.parametrize("broken", [b"", b"\x93", encode_prompt([1], [("image", Layout((1,)))])[:-1]])
def test_what_is_no_prompt_is_an_error_of_the_protocol(broken: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a prompt"):
        decode_prompt(broken)
