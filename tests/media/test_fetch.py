"""Fetching from real servers: what comes, how often it is asked for, and what is kept."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from semel.core import Tenant
from semel.errors import MediaNotAllowed, MediaTooLarge, MediaUnavailable, TooManyBytes
from semel.media.fetch.fetch import Fetcher
from tests.media.origin import (
    LIMITS,
    TENANT,
    Names,
    Origin,
    Seen,
    fetcher,
    get,
    head,
    origin,
    reaching,
    reply,
    trusting,
)

CACHE_BYTES = 1 << 20
CACHED: dict[str, Any] = {"cache_control": "max-age=60"}


@pytest.fixture
async def server() -> AsyncIterator[Origin]:
    async with origin() as made:
        yield made


@pytest.fixture
async def fetching(server: Origin) -> AsyncIterator[Fetcher]:
    async with reaching(server, cache_bytes=CACHE_BYTES) as made:
        yield made


def numbers(fetching: Fetcher) -> dict[str, float]:
    return {
        metric.name.removeprefix("semel_media_") + "".join(labels): value
        for metric, value, labels in fetching.samples()
    }


async def test_the_bytes_come_as_they_are_and_the_target_goes_as_it_is(server: Origin, fetching: Fetcher) -> None:
    server["/a%2Fb/../c"] = b"\x89PNG"
    assert await get(fetching, server.url("/a%2Fb/../c?x=%41&y=[1]+2#part")) == b"\x89PNG"
    (seen,) = server.seen
    assert seen.target == "/a%2Fb/../c?x=%41&y=[1]+2"
    assert seen.headers["host"] == f"127.0.0.1:{server.port}"
    assert seen.headers["accept-encoding"] == "identity"
    assert not {"cookie", "authorization", "referer"} & seen.headers.keys()


async def test_no_cookie_that_a_server_sets_comes_back(server: Origin) -> None:
    server["/a"] = reply(b"a", set_cookie="session=1; Path=/")
    async with fetcher(f"cat.example:{server.port}", lookup=Names(cat_example=[["127.0.0.1"]])) as fetching:
        for _ in range(2):
            await get(fetching, server.url("/a", "cat.example"))
    assert len(server.seen) == 2
    assert all("cookie" not in seen.headers for seen in server.seen)


async def test_a_server_has_to_prove_its_name_over_tls() -> None:
    async with origin(tls=True) as server:
        server["/"] = b"cat"
        names = Names(cat_example=[["127.0.0.1"]], dog_example=[["127.0.0.1"]])
        hosts = [f"{name}.example:{server.port}" for name in ("cat", "dog")]
        async with fetcher(*hosts, lookup=names, tls=trusting()) as fetching:
            assert await get(fetching, server.url("/", "cat.example")) == b"cat"
            with pytest.raises(MediaUnavailable):
                await get(fetching, server.url("/", "dog.example"))
        async with fetcher(*hosts, lookup=names) as fetching:
            with pytest.raises(MediaUnavailable):
                await get(fetching, server.url("/", "cat.example"))
        assert len(server.seen) == 1


@pytest.mark.parametrize("status", [201, 204, 206, 304, 400, 404, 500, 503])
async def test_any_status_but_200_is_named_and_nothing_else_of_the_answer_S7(
    server: Origin, fetching: Fetcher, status: int
) -> None:
    server["/a"] = reply(b"" if status in (204, 304) else b"secret words", status)
    with pytest.raises(MediaUnavailable, match=f"status {status}") as caught:
        await get(fetching, server.url("/a"))
    assert "secret" not in str(caught.value)
    assert numbers(fetching)["fetches_totalunavailable"] == 1


async def test_a_connection_that_breaks_before_the_answer_is_tried_once_more_and_not_twice(
    server: Origin, fetching: Fetcher
) -> None:
    failures = 0

    async def break_off(_: Seen, writer: asyncio.StreamWriter) -> None:
        nonlocal failures
        failures += 1
        if failures == 2:
            writer.write(head(content_length="1") + b"a")
        writer.close()

    server["/a"] = break_off
    assert await get(fetching, server.url("/a")) == b"a"
    failures = 2
    with pytest.raises(MediaUnavailable, match="cannot be connected to, or broke off"):
        await get(fetching, server.url("/a"))
    assert failures == 4


async def test_an_answer_that_breaks_off_is_not_asked_for_again(server: Origin, fetching: Fetcher) -> None:
    async def break_off(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(head(content_length="100") + b"half")
        writer.close()

    server["/a"] = break_off
    with pytest.raises(MediaUnavailable, match="broke off"):
        await get(fetching, server.url("/a"))
    assert len(server.seen) == 1


async def test_equal_fetches_in_flight_are_one_within_a_tenant_and_two_across_tenants_S12(
    server: Origin, fetching: Fetcher
) -> None:
    go = asyncio.Event()

    async def wait(_: Seen, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        writer.write(head(content_length="1") + b"a")

    server["/a"] = wait
    tenants = [TENANT] * 5 + [Tenant("bob"), replace(TENANT, salt="s")]
    tasks = [asyncio.create_task(get(fetching, server.url("/a"), tenant)) for tenant in tenants]
    await server.until(lambda: len(server.seen) == 3)
    go.set()
    assert await asyncio.gather(*tasks) == [b"a"] * 7
    assert len(server.seen) == 3
    assert numbers(fetching)["fetches_joined_total"] == 4


async def test_the_last_who_waits_takes_the_connection_along_when_it_goes(server: Origin, fetching: Fetcher) -> None:
    never = asyncio.Event()

    async def wait(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(head(content_length="100") + b"half")
        await writer.drain()
        await never.wait()

    server["/a"] = wait
    first, second = (asyncio.create_task(get(fetching, server.url("/a"))) for _ in range(2))
    await server.until(lambda: len(server.seen) == 1)
    first.cancel()
    await asyncio.wait({first})
    assert server.connections == 1
    second.cancel()
    await asyncio.wait({second})
    server["/b"] = b"b"
    assert await get(fetching, server.url("/b")) == b"b"  # over a connection of its own: the other one is closed
    never.set()
    await server.until(lambda: server.connections == 1)
    assert numbers(fetching)["fetches_totalabandoned"] == 1


async def test_connections_to_one_host_are_bounded(server: Origin) -> None:
    go = asyncio.Event()

    async def wait(_: Seen, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        writer.write(head(content_length="1") + b"a")

    for number in range(6):
        server[f"/{number}"] = wait
    async with reaching(server, limits=replace(LIMITS, connections_per_host=2)) as fetching:
        tenants = [Tenant(name) for name in "abcdef"]
        tasks = [asyncio.create_task(get(fetching, server.url(f"/{n}"), tenant)) for n, tenant in enumerate(tenants)]
        await server.until(lambda: len(server.seen) == 2)
        go.set()
        await asyncio.gather(*tasks)
        assert server.connections == 2


async def test_what_is_fresh_is_not_asked_for_again_by_the_same_tenant_S12(server: Origin, fetching: Fetcher) -> None:
    server["/a"] = reply(b"a", **CACHED)
    for tenant in (TENANT, TENANT, Tenant("bob"), Tenant("bob")):
        assert await get(fetching, server.url("/a"), tenant) == b"a"
    assert len(server.seen) == 2
    assert (numbers(fetching)["cache_queries_total"], numbers(fetching)["cache_hits_total"]) == (4, 2)
    assert await get(fetching, server.url("/a#other")) == b"a"
    assert len(server.seen) == 2


@pytest.mark.parametrize("headers", [{}, {"cache_control": "no-store, max-age=60"}, {"vary": "*", **CACHED}])
async def test_what_may_not_be_kept_is_asked_for_every_time(
    server: Origin, fetching: Fetcher, headers: dict[str, Any]
) -> None:
    server["/a"] = reply(b"a", etag='"1"', **headers) if "cache_control" in headers else reply(b"a")
    for _ in range(2):
        await get(fetching, server.url("/a"))
    assert len(server.seen) == 2
    assert all("if-none-match" not in seen.headers for seen in server.seen)
    assert numbers(fetching)["cache_bytes"] == 0


async def test_what_is_stale_is_asked_about_and_confirmed_or_replaced(server: Origin) -> None:
    clock = [1_000_000.0]
    etag = '"1"'

    async def answer(seen: Seen, writer: asyncio.StreamWriter) -> None:
        if seen.headers.get("if-none-match") == etag:
            writer.write(head(304, etag=etag, cache_control="max-age=10"))
        else:
            body = etag.encode()
            writer.write(head(content_length=str(len(body)), etag=etag, cache_control="max-age=10") + body)

    server["/a"] = answer
    async with reaching(server, cache_bytes=CACHE_BYTES, now=lambda: clock[0]) as fetching:
        for seconds, expected in ((0, 1), (9, 1), (2, 2), (9, 2), (1, 3)):
            clock[0] += seconds
            assert await get(fetching, server.url("/a")) == b'"1"'
            assert len(server.seen) == expected
        assert numbers(fetching)["cache_confirmed_total"] == 2
        assert numbers(fetching)["fetched_bytes_total"] == 3
        clock[0] += 10
        etag = '"2"'
        assert await get(fetching, server.url("/a")) == b'"2"'
        server["/a"] = reply(b"", 500)
        clock[0] += 10
        with pytest.raises(MediaUnavailable):  # what is stale is not served because its server has failed
            await get(fetching, server.url("/a"))


async def test_a_redirect_is_kept_with_its_target_only_if_both_allow_it(server: Origin, fetching: Fetcher) -> None:
    server["/b"] = reply(b"b", **CACHED)
    server["/kept"] = reply(b"", 301, location="/b", **CACHED)
    server["/moved"] = reply(b"", 302, location="b")
    for _ in range(2):
        assert await get(fetching, server.url("/kept")) == b"b"
        assert await get(fetching, server.url("/moved")) == b"b"
    assert server.targets == ["/kept", "/b", "/moved", "/b", "/moved", "/b"]


async def test_who_only_looks_finds_what_is_kept_and_leaves_no_trace_E1(server: Origin) -> None:
    for name in "abc":
        server[f"/{name}"] = reply(name.encode() * 1_000, **CACHED)
    async with reaching(server, cache_bytes=2 * 4_100) as fetching:
        for name in "ab":
            await get(fetching, server.url(f"/{name}"))
        before = numbers(fetching)
        await get(fetching, server.url("/a"), apart=True)
        assert numbers(fetching) == before
        await get(fetching, server.url("/c"), apart=True)
        assert server.targets == ["/a", "/b", "/c"]
        after = numbers(fetching)
        assert {name: before[name] for name in before if "cache" in name} == {
            name: after[name] for name in after if "cache" in name
        }
        await get(fetching, server.url("/c"))  # takes the place of the one used least recently, which is still a
        await get(fetching, server.url("/b"))
        assert server.targets == ["/a", "/b", "/c", "/c"]
        await get(fetching, server.url("/a"))
        assert server.targets == ["/a", "/b", "/c", "/c", "/a"]


async def test_every_byte_is_spent_before_it_is_kept_by_who_leads_joins_or_finds_it_S18(
    server: Origin, fetching: Fetcher
) -> None:
    go = asyncio.Event()

    async def answer(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(head(content_length="2000", **CACHED) + b"a" * 1_000)
        await writer.drain()
        await go.wait()
        writer.write(b"a" * 1_000)

    server["/a"] = answer
    spent: dict[str, list[int]] = {"leads": [], "joins": [], "finds": []}
    paid = asyncio.Event()

    def lead(nbytes: int) -> None:
        spent["leads"].append(nbytes)
        paid.set()

    leading = asyncio.create_task(get(fetching, server.url("/a"), spend=lead))
    async with asyncio.timeout(10):
        await paid.wait()
    joining = asyncio.create_task(get(fetching, server.url("/a"), spend=spent["joins"].append))
    await asyncio.sleep(0)
    assert not spent["joins"]
    go.set()
    await asyncio.gather(leading, joining)
    await get(fetching, server.url("/a"), spend=spent["finds"].append)
    assert sum(spent["leads"]) == 2_000
    assert len(spent["leads"]) >= 2
    assert spent["joins"] == spent["finds"] == [2_000]


@pytest.mark.parametrize("error", [MediaTooLarge("over 413"), TooManyBytes("over 429")])
async def test_who_cannot_pay_fails_alone_S18(
    server: Origin, fetching: Fetcher, error: MediaTooLarge | TooManyBytes
) -> None:
    go = asyncio.Event()

    async def answer(_: Seen, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        writer.write(head(content_length="3") + b"abc")

    server["/a"] = answer

    def refuse(_: int) -> None:
        raise error

    poor = asyncio.create_task(get(fetching, server.url("/a"), spend=refuse))
    await server.until(lambda: len(server.seen) == 1)
    rich = asyncio.create_task(get(fetching, server.url("/a")))
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(type(error), match=str(error)):
        await poor
    assert await rich == b"abc"


async def test_a_request_that_has_gone_is_charged_no_more_S18(server: Origin, fetching: Fetcher) -> None:
    go = asyncio.Event()

    async def answer(_: Seen, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        writer.write(head(content_length="3") + b"abc")

    server["/a"] = answer
    spent: list[int] = []
    gone = asyncio.create_task(get(fetching, server.url("/a"), spend=spent.append))
    await server.until(lambda: len(server.seen) == 1)
    staying = asyncio.create_task(get(fetching, server.url("/a")))
    await asyncio.sleep(0)
    gone.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await gone
    go.set()
    assert await staying == b"abc"
    assert not spent


async def test_outcomes_are_counted(server: Origin, fetching: Fetcher) -> None:
    server["/a"] = b"abc"
    server["/large"] = b"x" * (LIMITS.max_bytes + 1)
    await get(fetching, server.url("/a"))
    for path, error in (("/large", MediaTooLarge), ("/none", MediaUnavailable)):
        with pytest.raises(error):
            await get(fetching, server.url(path))
    with pytest.raises(MediaNotAllowed):
        await get(fetching, "https://elsewhere.example/")
    counted = {name: value for name, value in numbers(fetching).items() if name.startswith("fetches_total")}
    assert counted == {f"fetches_total{name}": 1 for name in ("fetched", "too_large", "unavailable", "refused")}
    assert numbers(fetching)["fetched_bytes_total"] == 3
    assert numbers(fetching)["fetch_seconds_total"] > 0
