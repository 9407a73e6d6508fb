"""Names and seals of entries: what is believed, and that nothing else is (threats S11, S12, S26)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.core import Digest, Key
from semel.core.embedding import Form
from semel.embeddings.seal import (
    CHUNK_BYTES,
    MANIFEST_BYTES,
    Header,
    Manifest,
    Seal,
    chunk_keys,
    embedding_name,
    manifest_key,
    probe_key,
    probe_name,
    seal_key,
    split_chunks,
)
from tests.embeddings.stores import IDENTITY, KEY, content, digest_of, pieces

FORM: Form = (7, 16, "torch.bfloat16")
NAME = embedding_name(KEY, IDENTITY, digest_of(1))
SEALS = seal_key(KEY)

forms = st.tuples(
    st.integers(1, 1 << 20), st.integers(1, 1 << 18), st.sampled_from(["torch.float32", "torch.bfloat16"])
)


def manifest_of(data: bytearray, form: Form = FORM, name: Digest = NAME, key: Key = SEALS) -> Manifest:
    header = Header.new(form)
    seal = Seal(key, name, header)
    seal.add([memoryview(data)])
    return Manifest(header, seal.digest())


def test_names_differ_by_fleet_encoder_and_item_and_are_never_each_other_S11_S12() -> None:
    names = {
        embedding_name(key, identity, digest_of(number))
        for key in (KEY, Key(bytes(32)))
        for identity in (b"", b"a", b"a\0")
        for number in (1, 2)
    }
    names |= {probe_name(key, identity) for key in (KEY, Key(bytes(32))) for identity in (b"", b"a", b"a\0")}
    names |= {Digest(seal_key(KEY).secret), Digest(KEY.secret)}
    assert len(names) == 12 + 6 + 2


def test_the_name_of_an_encoder_output_never_changes() -> None:
    """Workers of two versions share what they have stored only if it does not."""
    assert NAME.hex() == "c4701de57eba8d31ecb9b680fd056c6427a6bd4c60e94347ccb0bf259a4cfd88"
    assert manifest_key(NAME) == b"semel:e1:" + NAME.hex().encode()
    assert chunk_keys(NAME, b"\1\2", 2)[1] == b"semel:e1:" + NAME.hex().encode() + b":0102:1"
    assert probe_key(NAME) not in (manifest_key(NAME), *chunk_keys(NAME, b"", 3))


@given(forms)
def test_a_manifest_is_read_as_it_was_written(form: Form) -> None:
    manifest = Manifest(Header.new(form), bytes(range(32)))
    raw = manifest.pack(SEALS, NAME)
    assert len(raw) == MANIFEST_BYTES
    assert Manifest.unpack(raw, SEALS, NAME) == manifest


@given(st.integers(0, MANIFEST_BYTES - 1), st.integers(1, 255))
def test_a_manifest_with_any_byte_changed_is_none(index: int, flip: int) -> None:
    raw = bytearray(Manifest(Header(FORM, bytes(16)), bytes(32)).pack(SEALS, NAME))
    raw[index] ^= flip
    assert Manifest.unpack(bytes(raw), SEALS, NAME) is None


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, MANIFEST_BYTES - 1, MANIFEST_BYTES + 1])
def test_a_manifest_of_another_size_is_none(size: int) -> None:
    raw = Manifest(Header(FORM, bytes(16)), bytes(32)).pack(SEALS, NAME)
    assert Manifest.unpack((raw + b"\0")[:size], SEALS, NAME) is None


def test_a_manifest_under_another_name_or_key_is_none_S26() -> None:
    raw = Manifest(Header(FORM, bytes(16)), bytes(32)).pack(SEALS, NAME)
    assert Manifest.unpack(raw, SEALS, digest_of(1)) is None
    assert Manifest.unpack(raw, KEY, NAME) is None


@given(st.binary(max_size=120))
def test_any_bytes_are_a_header_only_if_they_are_what_pack_makes_of_it(raw: bytes) -> None:
    header = Header.unpack(raw)
    assert header is None or header.pack() == raw


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, b"x"),
        (7, b"2"),
        (8, b"Torch"),
        (8, b"\xff" * 24),
        (30, b"x"),
        (32, bytes(4)),
        (36, bytes(4)),
        (40, b"\1"),
        (48, b"\1"),
    ],
)
def test_a_header_is_refused_whose_fields_do_not_agree(position: int, value: bytes) -> None:
    raw = Header(FORM, bytes(16)).pack()
    changed = raw[:position] + value + raw[position + len(value) :]
    assert Header.unpack(raw) is not None
    assert Header.unpack(changed) is None


def test_a_seal_is_of_the_name_the_header_and_every_byte_in_order() -> None:
    data = content(7 * 16 * 2)
    manifest = manifest_of(data)

    def holds(changed: bytearray, *, name: Digest = NAME, header: Header | None = None, key: Key = SEALS) -> bool:
        seal = Seal(key, name, header or manifest.header)
        seal.add(pieces(changed, [1, 100]))
        return manifest.holds(seal)

    assert holds(data)
    assert not holds(data[::-1])
    assert not holds(data[:-1])
    assert not holds(data + b"\0")
    assert not holds(data, name=digest_of(1))
    assert not holds(data, key=KEY)
    assert not holds(data, header=replace(manifest.header, form=(16, 7, FORM[2])))
    assert not holds(data, header=replace(manifest.header, nonce=bytes(16)))


@settings(max_examples=30)
@given(st.lists(st.integers(0, 5), max_size=4), st.data())
def test_chunks_are_the_bytes_whatever_buffers_they_lie_in(sizes: list[int], data: st.DataObject) -> None:
    """In units of a third of a chunk, so that chunks end within buffers, at their ends, and across them."""
    unit = CHUNK_BYTES // 3 + 1
    buffers = [memoryview(bytes([index]) * (size * unit)) for index, size in enumerate(sizes)]
    whole = b"".join(buffers)
    nbytes = data.draw(st.integers(0, len(whole)))
    chunks = [b"".join(chunk) for chunk in split_chunks(buffers, nbytes)]
    assert b"".join(chunks) == whole[:nbytes]
    assert all(len(chunk) == CHUNK_BYTES for chunk in chunks[:-1])
    assert all(0 < len(chunk) <= CHUNK_BYTES for chunk in chunks)


def test_too_small_buffers_are_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="less than 11 bytes"):
        list(split_chunks([memoryview(bytes(10))], 11))
    with pytest.raises(ValueError, match="none that can be stored"):
        Header.new((1, 1, "torch.int8"))
