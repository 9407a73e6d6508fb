"""Fetches that frontends share through a media store in a folder, from a real server that counts them."""

from __future__ import annotations

import asyncio
import math
import os
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from obstore.store import MemoryStore

from semel.core import Digest, Tenant
from semel.errors import MediaNotAllowed, MediaUnavailable, TooManyBytes
from semel.frontend.budget import Budget
from semel.media.fetch import sharing
from semel.media.fetch.fetch import Fetcher
from semel.media.fetch.freshness import Freshness
from semel.media.fetch.responses import StoredResponse
from semel.media.fetch.url import WebUrl, parse_url
from semel.store import responses as stored_fetches
from semel.store.objects import BucketObjects
from semel.store.responses import BucketResponses
from semel.store.upload import FRONTEND, Payer
from tests.media.origin import TENANT, Names, Origin, Seen, fetcher, get, head, origin, reply
from tests.store.stores import MIB, Clock, FaultyObjects, HungDisk, on_disk, responses_over, store_over
from tests.waiting import until

BOB = Tenant("bob")
SALTED = Tenant("alice", "s")
CACHED: dict[str, Any] = {"cache_control": "max-age=60", "etag": '"1"'}
CAT = reply(b"cat", **CACHED)
WEB_URL = WebUrl("https", "cat.example", 443, "/")


class Frontends:
    """Frontends whose stores are objects of their own over one folder."""

    def __init__(self, folder: Path, server: Origin, stack: AsyncExitStack) -> None:
        self.folder, self.server, self.stack = folder, server, stack
        self.clock = Clock()
        self.made: list[Fetcher] = []
        self.responses: list[BucketResponses] = []

    async def start(
        self, objects: BucketObjects | None = None, *hosts: str, scope: bytes = b"", cache_bytes: int = MIB
    ) -> Fetcher:
        objects = objects or on_disk(self.folder)
        responses = responses_over(objects, await store_over(objects), scope)
        options: Any = {"cache_bytes": cache_bytes, "now": self.clock, "responses": responses}
        options["lookup"] = Names(cat_example=[["127.0.0.1"]])
        self.responses.append(responses)
        fetching = fetcher(f"127.0.0.1:{self.server.port}", *hosts, **options)
        self.made.append(await self.stack.enter_async_context(fetching))
        return self.made[-1]

    def counted(self, name: str, *labels: str) -> float:
        wanted, samples = f"semel_media_{name}", [one for fetching in self.made for one in fetching.samples()]
        return sum(value for metric, value, found in samples if (metric.name, found) == (wanted, labels))

    def stored(self, part: str = "") -> list[Path]:
        return [Path(home, name) for home, _, names in os.walk(self.folder / part) for name in names]


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Frontends]:
    async with origin() as server, AsyncExitStack() as stack:
        yield Frontends(tmp_path / "store", server, stack)


def slowly(body: bytes, delay_s: float = 0.0, **headers: Any) -> Any:
    """Confirms what a request names, whatever that is."""

    async def answer(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(delay_s)
        confirms = "if-none-match" in seen.headers
        writer.write(head(304, **headers) if confirms else head(200, content_length=str(len(body)), **headers) + body)

    return answer


def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a lease outlive its fetch, however busy the machine is."""
    monkeypatch.setattr(sharing, "LEASE_S", 60.0)
    monkeypatch.setattr(sharing, "_PATIENCE_S", 60.0)


async def check_equal_fetches_are_one(fleet: Frontends) -> None:
    urls, tenants = 12, (TENANT, BOB, SALTED)
    for number in range(urls):
        fleet.server[f"/{number}"] = slowly(b"%d" % number * 1_000, 0.01 * (number % 4), **CACHED)
    frontends = [await fleet.start() for _ in range(3)]
    fetches = [
        (fetching, fleet.server.url(f"/{number}"), tenant, b"%d" % number * 1_000)
        for number in range(urls)
        for tenant in tenants
        for fetching in frontends * 2
    ]
    got = await asyncio.gather(*(get(fetching, url, tenant) for fetching, url, tenant, _ in fetches))
    assert got == [data for *_, data in fetches]
    assert set(Counter(fleet.server.targets).values()) == {len(tenants)}  # 1.00 per URL and tenant
    assert fleet.counted("fetches_total", "fetched") == urls * len(tenants)
    assert fleet.counted("fetches_total", "shared") == 2 * urls * len(tenants)
    assert fleet.counted("fetches_unshared_total") == 0
    assert not fleet.stored("leases")


async def test_equal_fetches_of_three_frontends_are_one_for_each_tenant_S12(
    fleet: Frontends, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient(monkeypatch)
    await check_equal_fetches_are_one(fleet)


async def test_a_store_that_ignores_if_none_match_costs_fetches_and_fails_none(
    fleet: Frontends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above, too: without leases it fails."""

    async def overwrite(self: BucketObjects, path: str, data: bytes, *, payer: Payer = FRONTEND) -> bool:
        await self.put(path, data, payer=payer)
        return True

    patient(monkeypatch)
    monkeypatch.setattr(BucketObjects, "create", overwrite)
    with pytest.raises(AssertionError, match=r"9\} == \{3\}"):
        await check_equal_fetches_are_one(fleet)
    assert fleet.counted("fetches_total", "unavailable") == 0


async def check_another_frontend_uses_and_renews_a_response(fleet: Frontends) -> None:
    fleet.server["/a"] = slowly(b"cat", **CACHED)
    one, two, three = [await fleet.start(cache_bytes=0) for _ in range(3)]
    url = fleet.server.url("/a")
    for fetching in (one, two):
        assert await get(fetching, url) == b"cat"
    assert len(fleet.server.seen) == 1
    fleet.clock.now_s += 90
    for fetching in (three, two, one):
        assert await get(fetching, url) == b"cat"
    assert [seen.headers.get("if-none-match") for seen in fleet.server.seen] == [None, '"1"']
    assert fleet.counted("cache_confirmed_total") == 1
    assert len(fleet.stored("media-1")) == 1


async def test_a_stale_response_is_confirmed_once_and_its_freshness_is_written_back(fleet: Frontends) -> None:
    await check_another_frontend_uses_and_renews_a_response(fleet)


async def test_a_response_without_a_lifetime_is_confirmed_on_every_use_and_comes_once(fleet: Frontends) -> None:
    fleet.server["/a"] = slowly(b"cat", etag='"1"')
    frontends = [await fleet.start(cache_bytes=0) for _ in range(3)]
    for fetching in frontends:
        assert await get(fetching, fleet.server.url("/a")) == b"cat"
    assert [seen.headers.get("if-none-match") for seen in fleet.server.seen] == [None, '"1"', '"1"']


PRIVATE = ("private, max-age=60", "no-store", "max-age=60, Private", 'private="set-cookie", max-age=60')


async def check_a_private_response_is_not_shared(fleet: Frontends, cache_control: str) -> None:
    for path, target in (("/a", cache_control), ("/b", "max-age=60")):
        fleet.server[path] = slowly(b"secret", 0.05, etag='"1"', cache_control=target)
    fleet.server["/moved"] = reply(b"", 302, location="/b", cache_control=cache_control)
    frontends = [await fleet.start() for _ in range(2)]
    for path in ("/a", "/moved"):
        url = fleet.server.url(path)
        assert await asyncio.gather(*(get(fetching, url) for fetching in frontends)) == [b"secret"] * 2
    assert not fleet.stored()
    assert fleet.counted("fetches_total", "shared") == 0


@pytest.mark.parametrize("cache_control", PRIVATE)
async def test_a_private_response_is_not_stored_whether_asked_for_or_redirected_to_S12(
    fleet: Frontends, cache_control: str
) -> None:
    await check_a_private_response_is_not_shared(fleet, cache_control)


async def test_a_response_that_has_become_private_leaves_the_store_S12(fleet: Frontends) -> None:
    fleet.server["/a"] = CAT
    fetching = await fleet.start(cache_bytes=0)
    assert await get(fetching, fleet.server.url("/a")) == b"cat"
    assert fleet.stored()
    fleet.clock.now_s += 90
    fleet.server["/a"] = reply(b"cat", cache_control=PRIVATE[0])
    assert await get(fetching, fleet.server.url("/a")) == b"cat"
    assert not fleet.stored()


async def check_another_tenant_learns_nothing(fleet: Frontends) -> None:
    """Neither the bytes nor, by what is done for it, whether somebody has them."""
    calls = []
    for path, tenants in (("/a", (TENANT, BOB)), ("/b", (BOB,)), ("/c", (TENANT, SALTED)), ("/d", (SALTED,))):
        fleet.server[path] = CAT
        for tenant in tenants:
            fetching = await fleet.start(objects := FaultyObjects(on_disk(fleet.folder)))
            objects.calls.clear()
            assert await get(fetching, fleet.server.url(path), tenant) == b"cat"
        calls.append(objects.calls)
        assert fleet.server.targets.count(path) == len(tenants)
    assert calls == [calls[0]] * 4
    assert len({path.parent for path in fleet.stored("media-1")}) == 6


async def test_another_tenant_s_fetch_is_as_if_nobody_had_the_url_S12(fleet: Frontends) -> None:
    await check_another_tenant_learns_nothing(fleet)


async def check_a_forged_record_is_fetched_again(fleet: Frontends) -> None:
    for path in ("/a", "/b"):
        fleet.server[path] = reply(b"cat" + path.encode(), **CACHED)
        await get(await fleet.start(), fleet.server.url(path))
    one, other = fleet.stored("media-1")
    record, moved = one.read_bytes(), other.read_bytes()
    for forged in (moved, record[:-1] + b"x", record[:40], b"", record + b"x"):
        one.write_bytes(forged)
        other.write_bytes(moved)
        for path in ("/a", "/b"):
            assert await get(await fleet.start(), fleet.server.url(path)) == b"cat" + path.encode()
        one, other = sorted(fleet.stored("media-1"), key=lambda path: path.parent != one.parent)
    assert fleet.counted("fetches_unshared_total") == 0


async def test_a_record_that_was_changed_or_moved_is_fetched_again(fleet: Frontends) -> None:
    await check_a_forged_record_is_fetched_again(fleet)


async def test_the_policy_comes_before_the_store_and_covers_each_hop_S1(fleet: Frontends) -> None:
    there = f"cat.example:{fleet.server.port}"
    fleet.server["/a"] = reply(b"", 302, location=fleet.server.url("/b", "cat.example"), **CACHED)
    fleet.server["/b"] = CAT
    url = fleet.server.url("/a")
    assert await get(await fleet.start(None, there), url) == b"cat"
    assert await get(await fleet.start(None, there), url) == b"cat"
    assert fleet.server.targets == ["/a", "/b"]
    with pytest.raises(MediaNotAllowed, match="what the URL redirects to"):
        await get(await fleet.start(), url)
    for rules in ((), (there,)):  # under other rules there are other records, whatever the hops are
        fleet.server["/c"] = CAT
        assert await get(await fleet.start(None, *rules, scope=repr(rules).encode()), fleet.server.url("/c")) == b"cat"
    assert fleet.server.targets.count("/c") == 2
    fetching = await fleet.start(objects := FaultyObjects(on_disk(fleet.folder)))
    objects.calls.clear()
    with pytest.raises(MediaNotAllowed):
        await get(fetching, fleet.server.url("/b", "cat.example"))
    assert not objects.calls


async def test_bytes_are_charged_before_they_are_read_and_once_if_confirmed_S21(fleet: Frontends) -> None:
    fleet.server["/a"] = slowly(b"x" * 10_000, **CACHED)
    url = fleet.server.url("/a")
    await get(await fleet.start(), url)
    fetching = await fleet.start(objects := FaultyObjects(on_disk(fleet.folder)))
    objects.calls.clear()

    def refuse(nbytes: int) -> None:
        raise TooManyBytes(f"{nbytes}")

    with pytest.raises(TooManyBytes):
        await get(fetching, url, spend=refuse)
    assert objects.calls == ["list"]
    spent: list[int] = []
    again: list[int] = []
    await get(fetching, url, spend=spent.append)
    fleet.clock.now_s += 90
    await get(await fleet.start(), url, spend=spent.append)
    assert all(10_000 < nbytes < 11_000 for nbytes in spent), spent
    assert len(spent) == 2
    await get(fetching, url, spend=again.append)  # stale here, renewed by the other
    assert len(again) == 1
    assert fleet.counted("cache_confirmed_total") == 1


async def test_a_store_that_is_down_means_a_fetch_which_is_counted(fleet: Frontends) -> None:
    fleet.server["/a"] = CAT
    objects = FaultyObjects(on_disk(fleet.folder))
    fetching = await fleet.start(objects, cache_bytes=0)
    url = fleet.server.url("/a")
    for calls in range(4):  # whatever the first call is that fails
        objects.breaks_after = calls
        assert await get(fetching, url, Tenant(f"{calls}")) == b"cat"
    objects.breaks_after, objects.fault = None, "gone"
    for _ in range(20):
        assert await get(fetching, url) == b"cat"
    assert len(fleet.server.seen) == 24
    assert fleet.counted("fetches_total", "fetched") == 24
    # Three of the four calls come before the fetch. Then it is asked once, and left alone by this tenant.
    assert fleet.counted("fetches_unshared_total") == 3 + 20
    objects.fault = ""
    for _ in range(2):
        await get(fetching, url, BOB)
    assert fleet.counted("fetches_total", "shared") == 1


async def test_a_store_that_hangs_delays_a_tenant_s_fetches_once(
    fleet: Frontends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "_PATIENCE_S", 0.05)
    fleet.server["/a"] = CAT
    fetching = await fleet.start(cache_bytes=0)
    calls: list[object] = []

    async def hang(*call: object) -> None:
        calls.append(call)
        await asyncio.sleep(3_600)

    monkeypatch.setattr(fleet.responses[0], "read", hang)
    for tenant in (TENANT, BOB):
        for _ in range(10):
            assert await get(fetching, fleet.server.url("/a"), tenant) == b"cat"
    assert len(calls) == 2
    assert fleet.counted("fetches_unshared_total") == 20


class HungRecords(HungDisk):
    """A disk that hangs with anything but leases."""

    async def put_async(self, path: str, data: bytes, **options: Any) -> Any:  # type: ignore[override]
        kind = MemoryStore if options.get("mode") == "create" else HungDisk
        return await kind.put_async(self, path, data, **options)


async def test_what_a_hanging_store_still_writes_stays_charged_when_the_request_has_ended_S18(
    fleet: Frontends, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient(monkeypatch)
    fetching = await fleet.start(BucketObjects(disk := HungRecords(), 60.0))
    shared = fetching._shared
    assert shared is not None

    async def answer(seen: Seen, writer: asyncio.StreamWriter) -> None:
        shared._breaker._timeout_s = 0.05  # what comes before the write may take its time
        await slowly(b"x" * 10_000, **CACHED)(seen, writer)

    fleet.server["/a"] = answer
    budget = Budget()
    with budget.open("alice") as account:
        await get(fetching, fleet.server.url("/a"), spend=account.take, pin=account.pin)
        assert disk.writes == 1
    assert budget.in_flight == 10_000
    disk.woken.set()
    await until(lambda: budget.in_flight == 0)


async def test_few_records_are_made_at_a_time_while_the_store_is_slow_S21(
    fleet: Frontends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "_PATIENCE_S", 20.0)
    monkeypatch.setattr(stored_fetches, "_MAX_PACKED", 30_000)
    pack, made = BucketResponses._pack, list[int]()

    def packed(self: BucketResponses, digest: Digest, response: StoredResponse) -> bytes:
        made.append(len(response.data))
        return pack(self, digest, response)

    monkeypatch.setattr(BucketResponses, "_pack", packed)
    for number in range(10):
        fleet.server[f"/{number}"] = slowly(b"x" * 10_000, **CACHED)
    fetching = await fleet.start(BucketObjects(disk := HungRecords(), 20.0))
    fetches = asyncio.gather(*(get(fetching, fleet.server.url(f"/{number}")) for number in range(10)))
    await until(lambda: len(fleet.server.seen) == 10 and disk.writes >= 3)
    await asyncio.sleep(0.1)  # more would be made at once
    assert made == [10_000] * 3
    disk.woken.set()
    await fetches
    assert len(made) == 10


@pytest.mark.parametrize("left_s", [0.3, -5.0, 1e9, math.nan])
async def test_a_lease_that_was_left_behind_delays_others_once(
    fleet: Frontends, monkeypatch: pytest.MonkeyPatch, left_s: float
) -> None:
    monkeypatch.setattr(sharing, "LEASE_S", 0.4)
    fleet.server["/a"] = CAT
    frontends, url = [await fleet.start(cache_bytes=0) for _ in range(3)], fleet.server.url("/a")
    assert await fleet.responses[0].take_lease((TENANT, cast("WebUrl", parse_url(url))), 1.0)
    (lease,) = fleet.stored("leases")
    lease.write_bytes(struct.pack("<d", time.time() + left_s))
    async with asyncio.timeout(5):
        assert await asyncio.gather(*(get(fetching, url) for fetching in frontends)) == [b"cat"] * 3
    assert not fleet.stored("leases")
    before = len(fleet.server.seen)
    assert await asyncio.gather(*(get(fetching, url) for fetching in frontends)) == [b"cat"] * 3
    assert len(fleet.server.seen) == before <= 3


@pytest.mark.parametrize("ahead_s", [15.0, -15.0])
async def test_equal_fetches_are_one_though_clocks_differ(
    fleet: Frontends, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    """By a quarter of a lease."""
    patient(monkeypatch)
    fleet.server["/a"] = slowly(b"cat", 0.3, **CACHED)
    frontends = [await fleet.start() for _ in range(3)]
    fleet.responses[0]._clock = lambda: time.time() + ahead_s
    first = asyncio.create_task(get(frontends[0], url := fleet.server.url("/a")))
    await until(lambda: bool(fleet.server.seen))
    assert await asyncio.gather(first, *(get(fetching, url) for fetching in frontends[1:])) == [b"cat"] * 3
    assert len(fleet.server.seen) == 1


async def test_a_lease_of_a_url_that_nobody_wants_any_more_is_swept(fleet: Frontends) -> None:
    await fleet.start()
    (responses,) = fleet.responses
    assert await responses.take_lease((TENANT, WEB_URL), 1.0)
    await responses.sweep()
    assert fleet.stored("leases")
    await responses.sweep()
    assert not fleet.stored("leases")


async def test_a_fetch_that_fails_or_is_cut_off_leaves_no_lease(fleet: Frontends) -> None:
    fetching = await fleet.start()
    with pytest.raises(MediaUnavailable):
        await get(fetching, fleet.server.url("/missing"))
    fleet.server["/slow"] = slowly(b"cat", 60)
    cut_off = asyncio.create_task(get(fetching, fleet.server.url("/slow")))
    await fleet.server.until(lambda: "/slow" in fleet.server.targets)
    cut_off.cancel()
    await until(lambda: not fleet.stored("leases"))


async def test_an_inspection_neither_uses_nor_fills_the_store(fleet: Frontends) -> None:
    fleet.server["/a"] = CAT
    for apart in (True, False, True):
        await get(await fleet.start(), fleet.server.url("/a"), apart=apart)
        assert bool(fleet.stored()) == (len(fleet.server.seen) > 1)
    assert len(fleet.server.seen) == 3


def not_writing_freshness_back(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = sharing.SharedFetches._publish

    async def mutant(self: Any, key: Any, stored: StoredResponse | None, *rest: Any) -> None:
        if stored is None:
            await publish(self, key, stored, *rest)

    monkeypatch.setattr(sharing.SharedFetches, "_publish", mutant)


def sharing_what_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Freshness.of

    def mutant(*fields: Any, **times: Any) -> Freshness:
        return replace(made := of(*fields, **times), shareable=made.storable)

    monkeypatch.setattr(Freshness, "of", mutant)


def naming_records_without_the_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BucketResponses, "_content", lambda _, key: str(key[1]).encode())


def believing_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.store.seal.compare_digest", lambda *_: True)


@pytest.mark.parametrize(
    ("check", "mutate"),
    [
        (check_another_frontend_uses_and_renews_a_response, not_writing_freshness_back),
        (partial(check_a_private_response_is_not_shared, cache_control=PRIVATE[0]), sharing_what_is_private),
        (check_another_tenant_learns_nothing, naming_records_without_the_salt),
        (check_a_forged_record_is_fetched_again, believing_records),
    ],
)
async def test_a_mutant_is_found_S12(
    fleet: Frontends, monkeypatch: pytest.MonkeyPatch, check: Any, mutate: Callable[[pytest.MonkeyPatch], None]
) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        await check(fleet)
