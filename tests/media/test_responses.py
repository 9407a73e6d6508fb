"""What is kept of fetches: bounded in bytes, the least recently used goes first."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core import Tenant
from semel.media.fetch import responses
from semel.media.fetch.freshness import Freshness
from semel.media.fetch.responses import ResponseCache, ResponseKey, StoredResponse
from semel.media.fetch.url import WebUrl

CAPACITY = 12_000
"""Room for three entries of 1,000 bytes and no fourth, with what they take beside them."""


def key(number: int, tenant: str = "") -> ResponseKey:
    return Tenant(tenant), WebUrl("https", "example.com", 443, f"/{number}")


def response(number: int, size: int = 1_000, *, storable: bool = True) -> StoredResponse:
    return StoredResponse(bytes(size), Freshness(0.0, 0.0, 60.0, storable), (key(number)[1],))


def test_what_is_too_large_or_may_not_be_kept_takes_the_place_of_what_was_there() -> None:
    for new in (response(0, CAPACITY), response(0, storable=False)):
        cache = ResponseCache(CAPACITY)
        cache.put(key(0), response(0))
        cache.put(key(0), new)
        assert cache.peek(key(0)) is None
        assert (len(cache), cache.nbytes) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12_000), st.booleans())))
def test_it_never_holds_more_than_it_may(puts: list[tuple[int, int, bool]]) -> None:
    cache = ResponseCache(CAPACITY)
    for number, size, storable in puts:
        cache.put(key(number), response(number, size, storable=storable))
        held = [stored for one in range(6) if (stored := cache.peek(key(one))) is not None]
        assert len(held) == len(cache)
        assert sum(len(stored.data) for stored in held) <= cache.nbytes <= CAPACITY
    for number in range(6):
        cache.put(key(number), response(number, storable=False))
    assert (len(cache), cache.nbytes) == (0, 0)


KINDS: dict[str, dict[str, Any]] = {
    "small": {},
    "large": {"size": 300_000},
    "long fields": dict.fromkeys(("vary", "etag", "last-modified", "expires", "date"), "x" * 1000),
    "a long etag": {"etag": '"' + "e" * 1_000 + '"'},
    "a long URL": {"path": "/" + "p" * 8_000},
    "four hops": {"hops": 4, "path": "/" + "h" * 8_000},
    "a long salt": {"salt": "s" * 1_024},
}
"""What an entry may be made of, as fetches make it; the server chooses its fields, the client the rest."""


def put_one(
    cache: ResponseCache, number: int, *, size: int = 1, path: str = "/", hops: int = 1, salt: str = "", **fields: str
) -> None:
    urls = [WebUrl("https", "example.com", 443, f"{path}{number}.{hop}") for hop in range(hops)]
    headers = {"cache-control": "max-age=600", **{name: f"{text}{number}" for name, text in fields.items()}}
    freshness = Freshness.of(headers, sent_at=0.0, received_at=0.0)
    assert freshness.storable
    cache.put((Tenant("acme", f"{salt}{number}"), urls[0]), StoredResponse(bytes(size), freshness, tuple(urls)))


def check_what_is_charged_is_what_is_held(kind: str, *, entries: int = 50) -> None:
    """By Python's own account of its memory: never more than was charged, and not far less."""
    cache = ResponseCache(1 << 30)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(entries):
            put_one(cache, number, **KINDS[kind])
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(cache) == entries
    assert held <= cache.nbytes <= 1.5 * held + 4_096 * entries, f"{held:,} bytes are held, {cache.nbytes:,} charged"


@pytest.mark.parametrize("kind", KINDS)
def test_an_entry_is_charged_what_it_takes_S24(kind: str) -> None:
    check_what_is_charged_is_what_is_held(kind)


def test_a_mutant_that_charges_every_entry_alike_is_found_S24(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: of 150 answers with one byte and many fields 300 KB were charged, and 131 MB taken."""
    monkeypatch.setattr(responses, "_charge", lambda _, stored: len(stored.data) + 2_048)
    found = set()
    for kind in KINDS:
        try:
            check_what_is_charged_is_what_is_held(kind, entries=20)
        except AssertionError:
            found.add(kind)
    assert found >= {"long fields", "a long URL", "four hops"}


def test_a_mutant_that_leaves_out_what_a_client_chooses_is_found_S24(monkeypatch: pytest.MonkeyPatch) -> None:
    charge = responses._charge
    plain = key(0)
    monkeypatch.setattr(responses, "_charge", lambda _, stored: charge(plain, replace(stored, hops=())))
    with pytest.raises(AssertionError):
        check_what_is_charged_is_what_is_held("four hops")
