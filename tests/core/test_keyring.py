"""Keys and whose they are."""

from __future__ import annotations

import pytest

from semel.core import Keyring, is_key
from semel.core.keyring import hash_key

KEY = "k" * 16


def test_a_key_tells_its_tenant() -> None:
    ring = Keyring([("acme", KEY), ("acme", KEY + "2"), ("umbra", KEY + "3")])
    assert [ring.tenant(key) for key in (KEY, KEY + "2", KEY + "3")] == ["acme", "acme", "umbra"]


@pytest.mark.parametrize("key", ["", "k", KEY + "4", KEY[:-1], KEY.upper(), " " + KEY, "\udcff" * 16])
def test_any_other_key_is_nobodys(key: str) -> None:
    assert Keyring([("acme", KEY)]).tenant(key) is None


def test_a_keyring_never_shows_a_key() -> None:
    ring = Keyring([("acme", KEY)])
    assert repr(ring) == "Keyring(1 keys of 1 tenants)"
    assert KEY.encode() not in b"".join(ring._tenants)


@pytest.mark.parametrize("second", ["acme", "umbra-is-long-enough", "sha256:"])
def test_no_error_shows_a_key_that_stands_where_its_tenant_should(second: str) -> None:
    """The columns of a file are exchanged easily: the name of a tenant is no secret, but that of a key is."""
    other = "k" * 20
    with pytest.raises(ValueError, match=r"key \d") as raised:
        Keyring([(KEY, second), (other, second)])
    assert KEY not in str(raised.value)
    assert other not in str(raised.value)


@pytest.mark.parametrize("key", ["", "k" * 15, "k" * 15 + " ", "k" * 15 + "é", "k" * 15 + "\n"])
def test_what_could_be_guessed_or_no_header_carries_is_no_key(key: str) -> None:
    assert not is_key(key)
    with pytest.raises(ValueError, match=rf"key 1 is too short \({len(key)} of 16|has a blank, or a character"):
        Keyring([("acme", key)])


def test_a_key_may_be_stored_hashed_and_the_hash_is_no_key_S25() -> None:
    ring = Keyring([("acme", hash_key(KEY)), ("umbra", KEY + "2")])
    assert [ring.tenant(key) for key in (KEY, KEY + "2", hash_key(KEY))] == ["acme", "umbra", None]
    assert hash_key("abc") == "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert Keyring([("acme", hash_key(KEY).upper().replace("SHA256", "sha256"))]).tenant(KEY) == "acme"


def test_mutant_a_keyring_that_compares_what_is_stored_takes_the_hash_for_a_key_S25() -> None:
    stored = {hash_key(KEY): "acme"}
    assert stored.get(hash_key(KEY)) == "acme", "whoever reads the file is let in"
    assert Keyring([("acme", hash_key(KEY))]).tenant(hash_key(KEY)) is None


def test_one_key_for_two_tenants_is_refused_however_it_is_stored_S25() -> None:
    with pytest.raises(ValueError, match="key 2 is the same key as that of another tenant"):
        Keyring([("acme", KEY), ("umbra", hash_key(KEY))])


@pytest.mark.parametrize("text", ["sha256:", "sha256:abc", "sha256:" + "g" * 64, "sha256:" + "a" * 65])
def test_a_hash_that_is_none_is_refused_S25(text: str) -> None:
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        Keyring([("acme", text)])
