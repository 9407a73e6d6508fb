"""S11, S12: what makes two items the same, and what never does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import semel
from semel.core import Digest, Key, Tenant, digest, frame, hash_parts, tenant_name

KEY = Key(bytes(range(32)))
parts = st.lists(st.binary(max_size=12), max_size=5)


def one(media: bytes = b"png", **changes: object) -> Digest:
    arguments: dict[str, object] = {"key": KEY, "modality": "image", "fingerprint": "f", **changes}
    return digest(media, **arguments)  # type: ignore[arg-type]


@given(parts, parts)
def test_two_lists_of_parts_never_frame_to_the_same_bytes_S11(left: list[bytes], right: list[bytes]) -> None:
    assert (b"".join(frame(left)) == b"".join(frame(right))) == (left == right)


def test_the_naive_concatenation_that_framing_replaces_does_collide_S11() -> None:
    left, right = [b"ab", b"c"], [b"a", b"bc"]
    assert b"".join(left) == b"".join(right)
    assert b"".join(frame(left)) != b"".join(frame(right))


@pytest.mark.parametrize(
    "change",
    [
        {"media": b"PNG"},
        {"key": Key(bytes(32))},
        {"modality": "video"},
        {"fingerprint": "g"},
        {"options": {"min_pixels": 1}},
        {"tenant": Tenant("acme")},
        {"tenant": Tenant("", "salt")},
        {"tenant": Tenant("", "")},
    ],
)
def test_everything_that_changes_a_feature_or_its_owner_changes_the_digest_S12(change: dict[str, object]) -> None:
    assert one(**change) != one()  # type: ignore[arg-type]


@given(st.text(), st.text(), st.one_of(st.none(), st.text()), st.one_of(st.none(), st.text()))
def test_two_tenants_never_share_a_digest_S12(a: str, b: str, salt_a: str | None, salt_b: str | None) -> None:
    same = (a, salt_a) == (b, salt_b)
    assert (one(tenant=Tenant(a, salt_a)) == one(tenant=Tenant(b, salt_b))) == same


def test_the_order_of_options_does_not_matter() -> None:
    assert one(options={"a": 1, "b": 2}) == one(options={"b": 2, "a": 1})


def test_a_digest_has_256_bits_and_prints_short_S11() -> None:
    assert len(one()) == 32
    assert repr(Digest(bytes(32))) == "Digest(000000000000…)"
    with pytest.raises(ValueError, match="32 bytes, these are 8"):
        Digest(b"too weak")


def test_a_key_shows_its_id_and_never_its_secret() -> None:
    assert KEY.secret.hex() not in repr(KEY)
    assert KEY.id in repr(KEY)
    assert KEY.id != Key(bytes(32)).id
    with pytest.raises(ValueError, match="32 bytes"):
        Key(b"short")


def test_the_digest_is_public_and_stable() -> None:
    """Outside frameworks store digests: a change of this value is a change of the protocol."""
    assert semel.digest is digest
    assert one().hex() == "e1c4afb319ba8dfbe63c9b9158f3648ad3b871233d84cc51cbad826f304f9500"


@pytest.mark.parametrize(
    ("tenant", "expected"),
    [
        (Tenant("acme"), "b3ff3feaac7b37a49cb08151f5ee8a6238593fbb4ad4dd13ea3a7cb8bcdaa05e"),
        (Tenant("", ""), "15dbfeccd3966f710d18f0d880da52b1275a17952714ea03f1993fa24b242742"),
        (Tenant("acme", "sält"), "5414ed69b25fd667e73ea24f3ddcd526786531423ead107c650476cc2e8e9dba"),
    ],
)
def test_a_tenants_digests_are_stable(tenant: Tenant, expected: str) -> None:
    assert one(tenant=tenant).hex() == expected


def naive_parts(tenant: Tenant) -> tuple[bytes, bytes]:
    """The control: a missing salt is an empty one."""
    return tenant.name.encode(), (tenant.salt or "").encode()


@given(st.text(), st.text(), st.one_of(st.none(), st.text()), st.one_of(st.none(), st.text()))
def test_no_two_tenants_have_the_same_parts_S12(a: str, b: str, salt_a: str | None, salt_b: str | None) -> None:
    assert (Tenant(a, salt_a).parts == Tenant(b, salt_b).parts) == ((a, salt_a) == (b, salt_b))
    assert naive_parts(Tenant(a)) == naive_parts(Tenant(a, ""))


def test_half_a_surrogate_pair_is_no_salt_anywhere() -> None:
    with pytest.raises(UnicodeEncodeError):
        Tenant("", "\ud800").parts  # noqa: B018


def test_a_keyed_hash_of_parts_is_another_than_one_without_a_key() -> None:
    assert hash_parts([b"a", b"b"]).digest() == hash_parts([b"a", b"b"]).digest()
    digests = [
        hash_parts(parts, key).digest() for parts in ([b"a", b"b"], [b"ab"], [b"ab", b""]) for key in (None, KEY)
    ]
    assert len(set(digests)) == len(digests)


@given(
    st.lists(st.builds(Tenant, st.text("a\n\0\1", max_size=3), st.none() | st.text("a\n\0\1", max_size=3)), max_size=8)
)
def test_no_two_tenants_share_the_prefixes_of_an_engine(tenants: list[Tenant]) -> None:
    """S12. Names come from the operator, without line breaks; salts are whatever a client likes."""
    tenants = [tenant for tenant in tenants if "\n" not in tenant.name]
    assert len({tenant.prefix_salt for tenant in tenants}) == len(set(tenants))


def test_without_a_name_the_engine_gets_the_salt_as_it_came() -> None:
    assert [Tenant("", salt).prefix_salt for salt in (None, "", "pepper")] == [None, "", "pepper"]


@given(st.text("a\0\1é", max_size=3), st.none() | st.text("a\n\0\1", max_size=3))
def test_a_prefix_salt_tells_whose_it_is_whatever_salt_a_client_sends(name: str, salt: str | None) -> None:
    """S20: a share per tenant, not per salt."""
    assert tenant_name(Tenant(name, salt).prefix_salt) == name
