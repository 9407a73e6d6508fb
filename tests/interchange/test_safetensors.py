"""The file of injected features: round trips, the real library on either end, and all that a file may lie about."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.core import DTYPE_BYTES, Digest, Feature, Layout, Mask, Tensor
from semel.errors import InvalidRequest
from semel.interchange.safetensors import MAX_HEADER_BYTES, Empty, Entry, Faulty, FeatureEntry, read, read_file, write
from semel.processing import from_torch, to_torch
from semel.wire.limits import MAX_ITEMS, MAX_TENSORS
from tests.effort import examples
from tests.operations import operations
from tests.wire.examples import digest_of, feature_of_rows, same

NAME = digest_of(1).hex()
REST = {"modality": "image", "token_ids": [7, 8, 8, 9], "mask": [False, True, True, False]}
HEAD = {"dtype": "U8", "shape": [2, 2], "data_offsets": [0, 4]}


def joined(features: Mapping[Digest, Feature]) -> memoryview:
    return memoryview(b"".join(write(features)))


def file(header: object, data: bytes = b"", rests: object = None) -> memoryview:
    """A file by hand: a header, or the text of one."""
    if isinstance(header, dict) and rests is not None:
        header = {"__metadata__": {"semel": json.dumps(rests)}, **header}
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return memoryview(len(text).to_bytes(8, "little") + text + data)


def only(body: memoryview) -> Entry:
    (entry,) = read(body)
    return entry


dtypes = st.sampled_from(sorted(DTYPE_BYTES))
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
ids = st.integers(0, 2**31 - 1)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype, shape = draw(dtypes), draw(shapes)
    nbytes = DTYPE_BYTES[dtype]
    for size in shape:
        nbytes *= size
    return Tensor(dtype, shape, memoryview(draw(st.binary(min_size=nbytes, max_size=nbytes))))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    token_ids = draw(st.lists(ids, min_size=1, max_size=6).map(tuple))
    bits = draw(st.none() | st.lists(st.booleans(), min_size=len(token_ids), max_size=len(token_ids)))
    return Layout(token_ids, None if bits is None or all(bits) else Mask(bits))


fields = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.]{0,12}", fullmatch=True)
modalities = st.sampled_from(["audio", "image", "video"])
made = st.builds(Feature, modalities, st.dictionaries(fields, tensors(), min_size=1, max_size=4), layouts())
batches = st.dictionaries(st.binary(min_size=32, max_size=32).map(Digest), made, max_size=4)


@given(batches)
def test_what_is_written_is_read_to_the_byte_D6(features: dict[Digest, Feature]) -> None:
    entries = read(joined(features))
    assert len(entries) == len(features)
    for entry in entries:
        assert isinstance(entry, FeatureEntry)
        assert same(entry.feature, features[entry.digest])


@given(batches, st.data())
@settings(max_examples=examples(300))
def test_a_damaged_file_is_refused_or_read_and_nothing_else_S10(
    features: dict[Digest, Feature], data: st.DataObject
) -> None:
    body = bytearray(joined(features))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(body)) | st.just(len(body)))
    try:
        entries = read(memoryview(body)[:cut])
    except InvalidRequest as error:
        assert str(error).isascii()
        assert len(str(error)) < 500
    else:
        for entry in entries:
            json.dumps(entry.reason if isinstance(entry, Faulty) else "").encode("ascii")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.text() | st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "semel"]), inner
            )
        ),
    )
)
def test_any_json_for_a_header_is_refused_or_read_S10(value: object) -> None:
    for body in (
        file(value),
        file({"__metadata__": {"semel": json.dumps(value)}}),
        file({NAME: value}, b"abcd", value),
    ):
        try:
            read(body)
        except InvalidRequest:
            continue


def test_tensors_are_read_only_views_of_the_file_and_begin_aligned() -> None:
    features = {digest_of(n): feature_of_rows(n) for n in range(1, 4)}
    features[digest_of(9)] = Feature("image", {"odd": Tensor("uint8", (3,), memoryview(b"abc"))}, Layout((1,)))
    body = bytearray(joined(features))
    entries = read(memoryview(body))
    assert len(entries) == len(features)
    for entry in entries:
        assert isinstance(entry, FeatureEntry)
        for tensor in entry.feature.tensors.values():
            assert tensor.data.readonly
            assert tensor.data.obj is body
            assert to_torch(tensor).data_ptr() % DTYPE_BYTES[tensor.dtype] == 0


def test_a_tensor_that_begins_askew_is_copied() -> None:
    head = {
        "a": HEAD | {"shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]},
    }
    header = {f"{NAME}/{field}": value for field, value in head.items()}
    for blanks in range(8):
        text = json.dumps({"__metadata__": {"semel": json.dumps({NAME: REST})}, **header}).encode() + b" " * blanks
        body = file(text, b"\x01" + b"\x00\x00\x80\x3f")
        entry = only(body)
        assert isinstance(entry, FeatureEntry)
        assert to_torch(entry.feature.tensors["b"]).tolist() == [1.0]
        assert (entry.feature.tensors["b"].data.obj is body.obj) == (not (8 + len(text) + 1) % 4)


def test_what_is_about_to_be_copied_and_parsed_is_told_before() -> None:
    features = {digest_of(n): feature_of_rows(n) for n in range(1, 4)}
    aligned = joined(features)
    length = int.from_bytes(aligned[:8], "little")
    text = bytes(aligned[8 : 8 + length])
    for blanks in range(8):
        body = file(text + b" " * blanks, bytes(aligned[8 + length :]))
        spent: list[int] = []
        seen: list[str] = []
        read_file(body, admit=seen.append, spend=spent.append)
        floats = 0 if blanks % 4 == 0 else 16 * (1 + 2 + 3)
        grids = 0 if blanks == 0 else 3 * 24
        assert sum(spent) == floats + grids
        structure, layouts = seen
        assert not set(structure) & set('"abcdefghijklmnopqrstuvwxyz\\')
        assert json.loads(layouts).keys() == {digest.hex() for digest in features}


def test_a_file_that_is_not_admitted_is_not_read() -> None:
    def refuse(_: object) -> None:
        raise InvalidRequest("too much")

    floats = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    text = bytes(file({f"{NAME}/x": floats}, rests={NAME: REST})[8:])
    askew = file(text + b" " * (1 + -len(text) % 4), b"abcd")
    for hook in ("admit", "spend"):
        with pytest.raises(InvalidRequest, match="too much"):
            read_file(askew, **{hook: refuse})


def test_writing_copies_no_tensor() -> None:
    feature = feature_of_rows(5)
    views = write({digest_of(1): feature})[1:]
    assert {id(view.obj) for view in views if isinstance(view, memoryview)} == {
        id(tensor.data.obj) for tensor in feature.tensors.values()
    }


@pytest.mark.parametrize("dtype", list(DTYPE_BYTES))
def test_the_real_library_reads_what_is_written_and_writes_what_is_read(dtype: str) -> None:
    import safetensors.torch
    import torch

    values = torch.arange(24).reshape(2, 3, 4).to(getattr(torch, dtype))
    grid = torch.tensor([1, 2, 3])
    feature = Feature("image", {"pixel_values": from_torch(values), "grid": from_torch(grid)}, Layout((7, 8)))
    loaded = safetensors.torch.load(bytes(joined({digest_of(1): feature})))
    assert torch.equal(loaded[f"{NAME}/pixel_values"], values)
    assert torch.equal(loaded[f"{NAME}/grid"], grid)
    rests = json.dumps({NAME: {"modality": "image", "token_ids": [7, 8]}})
    entry = only(memoryview(safetensors.torch.save(loaded, {"semel": rests, "other": "ignored"})))
    assert isinstance(entry, FeatureEntry)
    assert same(entry.feature, feature)


def test_a_mask_that_leaves_nothing_out_is_none() -> None:
    rest = {"modality": "image", "token_ids": [7, 8], "mask": [True, True]}
    entry = only(file({f"{NAME}/x": HEAD}, b"abcd", {NAME: rest}))
    assert isinstance(entry, FeatureEntry)
    assert entry.feature.layout == Layout((7, 8))


def with_head(**change: object) -> memoryview:
    return file({f"{NAME}/x": HEAD | change}, b"abcd", {NAME: REST})


def two(first: tuple[int, int], second: tuple[int, int], data: bytes) -> memoryview:
    spans = {"x": first, "y": second}
    header = {
        f"{NAME}/{field}": {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}
        for field, (start, end) in spans.items()
    }
    return file(header, data, {NAME: REST})


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (memoryview(b""), "at least 8 bytes"),
        (memoryview(b"\xff" * 8), "announces a header of"),
        (
            memoryview((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b" " * (MAX_HEADER_BYTES + 1)),
            "may have 16,777,216",
        ),
        (memoryview((99).to_bytes(8, "little") + b"{}"), "announces a header of 99"),
        (file(b"\xff\xfe"), "not UTF-8"),
        (file(b"[]"), "no JSON object"),
        (file(b"{} {}"), "cannot be read"),
        (file(b"[" * 100_000), "cannot be read"),
        (file(b'{"a":' * 100_000), "cannot be read"),
        (file(b'{"__metadata__":{"semel":"' + b"[" * 100_000 + b'"}}'), "metadata 'semel' cannot be read"),
        (file(b'{"a":' + b"9" * 5_000 + b"}"), "cannot be read"),
        (file(b'{"a":NaN}'), "NaN is no number"),
        (file(b'{"__metadata__":{"a":"1","a":"2"}}'), "stands twice"),
        (file(b'{"a":' + json.dumps(HEAD).encode() + b',"a":' + json.dumps(HEAD).encode() + b"}", b"abcd"), "twice"),
        (file({"__metadata__": {"semel": 1}}), "the metadata cannot be read"),
        (file({"__metadata__": {"semel": "[]"}}), "no JSON object"),
        (file({"__metadata__": {"semel": '{"a":1,"a":2}'}}), "stands twice"),
        (with_head(dtype="F8_E4M3"), "has the dtype F8_E4M3"),
        (with_head(shape=[2, 3]), "needs 6 bytes, it has 4"),
        (with_head(shape=[-2, -2]), "the header cannot be read"),
        (with_head(shape=[2**31 - 1] * 16), "needs"),
        (with_head(shape=[1] * 17), "the header cannot be read"),
        (with_head(shape=[2**80]), "the header cannot be read"),
        (with_head(shape=[True, 4]), "the header cannot be read"),
        (with_head(data_offsets=[4, 0]), "begins at 4"),
        (with_head(data_offsets=[0, 2**62]), "needs 4 bytes"),
        (with_head(surplus=1), "unknown field"),
        (file({f"{NAME}/x": HEAD}, b"abc", {NAME: REST}), "speaks of 4 bytes of tensors, 3 came"),
        (file({f"{NAME}/x": HEAD}, b"abcde", {NAME: REST}), "speaks of 4 bytes of tensors, 5 came"),
        (two((0, 4), (2, 6), b"abcdef"), "begins at 2, where 4 is due"),
        (two((0, 4), (0, 4), b"abcd"), "begins at 0, where 4 is due"),
        (two((0, 2), (3, 4), b"abcd"), "begins at 3, where 2 is due"),
        (file({}, b"", {f"{n:064x}": REST for n in range(MAX_ITEMS + 1)}), "at most 32,768 items"),
    ],
)
def test_a_broken_header_refuses_the_file_S9_S10(body: memoryview, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        read(body)


def rest(**change: object) -> dict[str, object]:
    return {NAME: REST | change}


@pytest.mark.parametrize(
    ("heads", "rests", "text"),
    [
        (["x"], {}, "no layout"),
        (["x"], rest(modality="smell"), "layout cannot be used: Invalid enum value"),
        (["x"], rest(modality="\ud800\n" * 500), "layout cannot be used"),
        (["x"], rest(token_ids=[2**31]), "layout cannot be used"),
        (["x"], rest(token_ids=[-1]), "layout cannot be used"),
        (["x"], rest(token_ids=[]), "layout cannot be used"),
        (["x"], rest(mask=[True]), "mask over 1"),
        (["x"], rest(mask=[0, 1, 1, 0]), "layout cannot be used"),
        (["x"], rest(surplus=1), "unknown field"),
        (["x"], {NAME: None}, "no layout"),
        (["x"], {NAME: [1]}, "layout cannot be used"),
        ([""], rest(), "DIGEST/FIELD"),
        (["a/b"], rest(), "DIGEST/FIELD"),
        (["a\nb"], rest(), "DIGEST/FIELD"),
        (["x" * 129], rest(), "DIGEST/FIELD"),
        ([f"x{n}" for n in range(MAX_TENSORS + 1)], rest(), "at most 64 tensors"),
    ],
)
def test_a_fault_of_one_item_refuses_that_item_and_no_other_D7(
    heads: list[str], rests: dict[str, Any], text: str
) -> None:
    good = digest_of(2).hex()
    header = dict.fromkeys([*(f"{NAME}/{head}" for head in heads), f"{good}/x"], HEAD)
    for position, name in enumerate(header):
        header[name] = HEAD | {"data_offsets": [4 * position, 4 * position + 4]}
    found = read(file(header, b"abcd" * len(header), rests | {good: REST}))
    entries = {entry.name if isinstance(entry, Faulty) else entry.digest.hex(): entry for entry in found}
    assert isinstance(entries[good], FeatureEntry)
    fault = entries[NAME]
    assert isinstance(fault, Faulty)
    assert text in fault.reason
    assert fault.reason.isascii()
    assert fault.reason.isprintable()
    assert len(fault.reason) < 300


@pytest.mark.parametrize(
    "name",
    ["AB" * 32, "ab" * 31 + "a", "ab" * 32 + "0", "", "g" * 64, "\n" * 500, "\ud800" * 64, "٣" * 64],
    ids=range(8),
)
def test_what_is_no_digest_refuses_the_item_D7_S11(name: str) -> None:
    entry = only(file({f"{name}/x": HEAD}, b"abcd", {name: REST}))
    assert isinstance(entry, Faulty)
    assert "no digest" in entry.reason
    assert (entry.name + "x").isprintable()
    assert len(entry.name) < 1_000


def test_an_entry_without_tensors_is_empty_D6() -> None:
    assert only(file({}, b"", {NAME: REST})) == Empty(digest_of(1))
    assert only(joined({digest_of(1): Feature("image", {}, Layout((1,)))})) == Empty(digest_of(1))


@pytest.mark.slow
def test_more_than_a_file_can_name_is_refused_before_it_is_sent() -> None:
    feature = Feature("image", {}, Layout(tuple(range(1 << 20))))
    with pytest.raises(InvalidRequest, match="send them in several"):
        write({digest_of(n): feature for n in range(4)})
    with pytest.raises(InvalidRequest, match="send several"):
        write({digest_of(n): Feature("image", {}, Layout((1,))) for n in range(MAX_ITEMS + 1)})


def test_reading_grows_with_the_items_and_not_with_their_square_S16() -> None:
    feature = Feature("image", {"x": Tensor("uint8", (1,), memoryview(b"a"))}, Layout((1, 2, 3, 4)))
    few, many = (joined({digest_of(n): feature for n in range(count)}) for count in (50, 400))
    assert len(read(many)) == 400
    assert operations(lambda: read(many)) < 10 * operations(lambda: read(few))
