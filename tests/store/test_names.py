"""Names in the media store: what an object is called, and whom it belongs to."""

from __future__ import annotations

from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from semel.core import Digest, Key
from semel.store.names import (
    MAX_NAME_BYTES,
    PURPOSES,
    StoredFile,
    file_id,
    matches_content,
    object_path,
    owner_name,
    parse_id,
    parse_object_path,
    public_id,
    short_name,
)

KEY, OTHER_KEY = Key(bytes(range(32))), Key(bytes(32))
CONTENT = blake3(b"content").digest()
NAMES = st.text(max_size=300)
FILES = st.builds(
    StoredFile,
    id=st.binary(min_size=32, max_size=32).map(Digest),
    owner=st.text(max_size=5).map(lambda tenant: owner_name("x" + tenant.encode(errors="ignore").hex(), KEY)),
    nbytes=st.integers(0, 1 << 40),
    revision=st.integers(0, 999_999_999),
    created_s=st.integers(0, 10**12 - 1),
    expires_s=st.integers(0, 10**12 - 1),
    modality=st.sampled_from(["audio", "image", "video", None]),
    purpose=st.sampled_from(PURPOSES),
    name=NAMES.map(short_name),
)


@given(FILES)
def test_an_object_s_name_tells_everything_of_its_file_and_fits_on_a_disk(file: StoredFile) -> None:
    path = object_path(file)
    assert parse_object_path(path, file.nbytes) == file
    assert path.isascii()
    assert max(map(len, path.split("/"))) <= 255


@given(st.text(max_size=80) | FILES.map(object_path).map(lambda path: path[:-1] + "?"))
def test_what_is_not_the_name_of_a_file_is_none_of_ours(path: str) -> None:
    assert parse_object_path(path, 1) is None


@given(NAMES)
def test_a_file_name_is_stored_within_a_length_and_without_folders(name: str) -> None:
    stored = short_name(name)
    assert len(stored.encode()) <= MAX_NAME_BYTES
    assert "/" not in stored
    assert stored.isprintable()


def test_a_long_file_name_keeps_its_extension() -> None:
    assert short_name("x" * 500 + ".png") == "x" * (MAX_NAME_BYTES - 4) + ".png"
    assert short_name("../../etc/screen.png") == "screen.png"
    assert short_name("ü" * 500).startswith("ü" * 40)


def test_two_tenants_or_two_fleets_have_neither_ids_nor_owners_in_common_S11_S12() -> None:
    places = [(tenant, key) for tenant in ("", "acme", "umbra") for key in (KEY, OTHER_KEY)]
    assert len({file_id(CONTENT, *place) for place in places}) == len(places)
    assert len({owner_name(*place) for place in places}) == len(places)
    assert not any(b"acme".hex() in owner_name(*place) or "acme" in owner_name(*place) for place in places)


def test_the_bytes_of_a_file_are_known_by_its_id() -> None:
    digest = file_id(CONTENT, "acme", KEY)
    assert matches_content(digest, CONTENT, "acme", KEY)
    assert not matches_content(digest, blake3(b"other").digest(), "acme", KEY)
    assert not matches_content(digest, CONTENT, "umbra", KEY)


@given(st.binary(min_size=32, max_size=32).map(Digest))
def test_an_id_that_clients_know_is_read_back(digest: Digest) -> None:
    assert parse_id(public_id(digest)) == digest


@given(st.text(max_size=100) | st.from_regex(r"file-[0-9A-Fa-f]{60,70}\n?", fullmatch=True))
def test_what_cannot_be_an_id_is_none(text: str) -> None:
    digest = parse_id(text)
    assert digest is None or public_id(digest) == text
