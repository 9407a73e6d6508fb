"""Keys and whose they are."""

from __future__ import annotations

import pytest

from semel.core import Keyring, is_key

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


def test_one_key_for_two_tenants_is_refused() -> None:
    with pytest.raises(ValueError, match="'umbra' has the same key as 'acme'"):
        Keyring([("acme", KEY), ("umbra", KEY)])


@pytest.mark.parametrize("key", ["", "k" * 15, "k" * 15 + " ", "k" * 15 + "é", "k" * 15 + "\n"])
def test_what_could_be_guessed_or_no_header_carries_is_no_key(key: str) -> None:
    assert not is_key(key)
    with pytest.raises(ValueError, match="at least 16"):
        Keyring([("acme", key)])
