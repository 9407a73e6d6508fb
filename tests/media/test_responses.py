"""What is kept of fetches: bounded in bytes, the least recently used goes first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from semel.core import Tenant
from semel.media.fetch.freshness import Freshness
from semel.media.fetch.responses import ResponseCache, ResponseKey, StoredResponse
from semel.media.fetch.url import WebUrl

CAPACITY = 3 * 3_048
"""Three entries of 1,000 bytes, with what an entry is charged beside them."""


def key(number: int, tenant: str = "") -> ResponseKey:
    return Tenant(tenant), WebUrl("https", "example.com", 443, f"/{number}")


def response(number: int, size: int = 1_000, *, storable: bool = True) -> StoredResponse:
    return StoredResponse(bytes(size), Freshness(0.0, 0.0, 60.0, storable), (key(number)[1],))


def test_the_least_recently_used_makes_room() -> None:
    cache = ResponseCache(CAPACITY)
    for number in range(3):
        cache.put(key(number), response(number))
    assert cache.get(key(0)) is not None
    assert cache.peek(key(1)) is not None  # which changes nothing
    cache.put(key(3), response(3))
    assert [number for number in range(4) if cache.peek(key(number)) is not None] == [0, 2, 3]
    assert cache.nbytes == CAPACITY


def test_what_is_too_large_or_may_not_be_kept_takes_the_place_of_what_was_there() -> None:
    for new in (response(0, CAPACITY), response(0, storable=False)):
        cache = ResponseCache(CAPACITY)
        cache.put(key(0), response(0))
        cache.put(key(0), new)
        assert cache.peek(key(0)) is None
        assert (len(cache), cache.nbytes) == (0, 0)


def test_a_tenant_finds_only_its_own_S12() -> None:
    cache = ResponseCache(CAPACITY)
    cache.put(key(0, "alice"), response(0))
    assert cache.get(key(0, "bob")) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12_000), st.booleans())))
def test_it_never_holds_more_than_it_may(puts: list[tuple[int, int, bool]]) -> None:
    cache = ResponseCache(CAPACITY)
    for number, size, storable in puts:
        cache.put(key(number), response(number, size, storable=storable))
        held = [stored for one in range(6) if (stored := cache.peek(key(one))) is not None]
        assert len(held) == len(cache)
        assert sum(len(stored.data) + 2_048 for stored in held) == cache.nbytes <= CAPACITY
