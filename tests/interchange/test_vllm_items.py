"""Items in vLLM's packing: whatever a client sends is a tensor or refused, in our words (S7, S9, S10)."""

from __future__ import annotations

import base64

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.msgpack import Ext

from semel.core import DTYPE_BYTES
from semel.errors import InvalidRequest, MediaTooLarge
from semel.interchange.vllm_items import read_item


def packed(**elements: object) -> bytes:
    return msgspec.msgpack.encode({name: {"data": data, "field": ("flat", {})} for name, data in elements.items()})


GOOD = packed(pixels=("uint8", (2, 3), Ext(3, b"abcdef")), grid=("int64", (3,), Ext(3, bytes(24))))


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_an_item_becomes_its_tensors() -> None:
    item = read_item(text(GOOD))
    assert {name: (one.dtype, one.shape, bytes(one.data)) for name, one in item.items()} == {
        "pixels": ("uint8", (2, 3), b"abcdef"),
        "grid": ("int64", (3,), bytes(24)),
    }
    assert all(one.data.readonly for one in item.values())


@given(st.integers(0, len(GOOD) - 1), st.binary(max_size=4), st.integers(0, 8))
def test_a_damaged_item_is_an_item_or_refused(place: int, put: bytes, cut: int) -> None:
    damaged = GOOD[:place] + put + GOOD[place + cut :]
    try:
        item = read_item(text(damaged))
    except InvalidRequest:
        return
    for one in item.values():
        assert one.data.nbytes <= len(damaged)
        assert one.dtype in DTYPE_BYTES


@given(st.text(max_size=64))
def test_any_text_is_an_item_or_refused(any_text: str) -> None:
    with pytest.raises(InvalidRequest):
        read_item(any_text)


def test_a_shape_is_not_believed_before_its_bytes_are_there() -> None:
    for shape in ((2**31 - 1,) * 16, (1 << 30,), (0,), (7,)):
        with pytest.raises(InvalidRequest, match="no tensor"):
            read_item(text(packed(pixels=("uint8", shape, Ext(3, b"abcdef")))))


def test_an_item_over_the_limit_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(MediaTooLarge, match="a feature may have"):
        read_item("*" * (400 << 20))
