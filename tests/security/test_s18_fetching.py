"""S18: slow servers that one tenant names cost the others neither connections nor lookups of names."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from semel.core import Tenant
from semel.errors import MediaNotAllowed, MediaUnavailable
from semel.media.fetch.download import FetchLimits
from semel.media.fetch.fetch import Fetcher, FetchOptions
from semel.media.fetch.policy import MediaPolicy
from semel.media.fetch.url import parse_url
from semel.render.media.source import MediaUrl
from semel.render.media.source_fetch import fetch_sources
from semel.store import no_pin
from tests.media.origin import LIMITS, Origin, Seen, fetcher, get, origin, reply

ALICE, BOB = Tenant("alice"), Tenant("bob")
SLOW, QUICK = "127.0.0.2", "127.0.0.1"
MANY = 64


class WithoutTurns(FetchLimits):
    """The control: who comes first has it all."""

    @property
    def fetches_per_tenant(self) -> int:
        return self.connections

    @property
    def fetches_per_tenant_and_host(self) -> int:
        return self.connections_per_host


PATIENT = replace(LIMITS, total_s=120.0, idle_s=120.0)
AT_ONCE_S = 30.0
"""Half a second where nothing else runs; who has to wait for the others waits four times as long."""

OURS = replace(PATIENT, connections=MANY, connections_per_host=MANY)
NAIVE = WithoutTurns(LIMITS.max_bytes, total_s=120.0, idle_s=120.0, connections=MANY, connections_per_host=MANY)


async def stall(_: Seen, __: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


@asynccontextmanager
async def attacked(limits: FetchLimits, under_way: int) -> AsyncIterator[tuple[Fetcher, Origin, Origin]]:
    """Alice asks a slow server for many things, with another salt for each; so many of them are under way."""
    async with origin(SLOW) as slow, origin(QUICK) as quick:
        slow["/quick"] = quick["/quick"] = reply(b"a")
        rules = [f"{one.host}:{one.port}" for one in (slow, quick)]
        async with fetcher(*rules, networks=["127.0.0.0/30"], limits=limits) as fetching:
            tasks = []
            for number in range(MANY):
                slow[f"/{number}"] = stall
                tenant = replace(ALICE, salt=str(number))
                tasks.append(asyncio.create_task(get(fetching, slow.url(f"/{number}"), tenant)))
            try:
                await slow.until(lambda: len(slow.seen) >= under_way)
                yield fetching, slow, quick
                assert len(slow.targets) - slow.targets.count("/quick") == under_way
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


async def test_beside_a_tenant_with_very_many_slow_fetches_another_is_served_at_once_S18() -> None:
    async with attacked(OURS, MANY // 4) as (fetching, slow, quick), asyncio.timeout(AT_ONCE_S):
        assert await get(fetching, quick.url("/quick"), BOB) == b"a"
        assert await get(fetching, slow.url("/quick"), BOB) == b"a"


async def test_a_host_is_not_one_tenant_s_either_S18() -> None:
    limits = replace(PATIENT, connections=MANY, connections_per_host=4)
    async with attacked(limits, 2) as (fetching, slow, _), asyncio.timeout(AT_ONCE_S):
        assert await get(fetching, slow.url("/quick"), BOB) == b"a"


async def test_without_turns_the_other_tenant_gets_no_connection() -> None:
    """The control."""
    async with attacked(NAIVE, MANY) as (fetching, _, quick):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await get(fetching, quick.url("/quick"), BOB)
        assert not quick.seen


async def test_waiting_for_a_turn_is_in_the_time_of_a_fetch_S4() -> None:
    """One after the other, they would take 19 s."""
    limits = replace(LIMITS, total_s=0.3, connections=4)
    async with origin(SLOW) as slow, fetcher(f"{SLOW}:{slow.port}", networks=[f"{SLOW}/32"], limits=limits) as fetching:
        for number in range(MANY):
            slow[f"/{number}"] = stall
        async with asyncio.timeout(5):
            fetches = (get(fetching, slow.url(f"/{number}"), ALICE) for number in range(MANY))
            errors = await asyncio.gather(*fetches, return_exceptions=True)
    assert {type(error) for error in errors} == {MediaUnavailable}
    assert "--media-timeout-s" in str(errors[-1])


class Stuck:
    """A resolver that does not answer."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.changed = asyncio.Event()

    async def __call__(self, host: str) -> Sequence[str]:
        self.asked.append(host)
        self.changed.set()
        await asyncio.Event().wait()
        return ()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.asked) < count:
                self.changed.clear()
                await self.changed.wait()


@pytest.mark.parametrize("naive", [True, False])
async def test_lookups_whose_clients_have_gone_are_still_their_tenant_s_S18(
    monkeypatch: pytest.MonkeyPatch, naive: bool
) -> None:
    """A thread that looks up a name cannot be stopped: whoever comes and goes must not get more of them."""
    if naive:
        monkeypatch.setattr("semel.media.fetch.connector.outlasting", contextlib.nullcontext)
    lookup = Stuck()
    limits = replace(LIMITS, connections=8)
    async with fetcher("*", networks=(), limits=limits, lookup=lookup) as fetching:

        async def come_and_go(prefix: str) -> None:
            tasks = [asyncio.create_task(get(fetching, f"http://{prefix}{n}.example/", ALICE)) for n in range(2)]
            for _ in range(100):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        for prefix in "abcd":
            await come_and_go(prefix)
        assert len(lookup.asked) == (8 if naive else 2)
        task = asyncio.create_task(get(fetching, "http://bob.example/", BOB))
        await lookup.until(len(lookup.asked) + 1)
        assert lookup.asked[-1] == "bob.example"
        task.cancel()
        await asyncio.wait({task})


async def test_names_are_looked_up_in_threads_of_the_fetcher_s_own_S18(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event loop has four of them, or as many as it has for files and everything else."""
    go, names = threading.Event(), []
    stuck = threading.Semaphore(0)

    def getaddrinfo(host: str, *_: Any, **__: Any) -> list[Any]:
        names.append(threading.current_thread().name)
        if host != "quick.example":
            stuck.release()
            go.wait(10)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    policy = MediaPolicy.of(domains=["*"], networks=[], allow_http=True)
    fetching = Fetcher(FetchOptions(policy, OURS))
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(fetching.close)
        urls = [f"http://slow{number}.example/" for number in range(16)]
        tasks = [asyncio.create_task(get(fetching, url, ALICE)) for url in urls]
        try:
            for _ in urls:
                assert await asyncio.to_thread(stuck.acquire, timeout=5)
            with pytest.raises(MediaNotAllowed):
                async with asyncio.timeout(8):
                    await get(fetching, "http://quick.example/", BOB)
        finally:
            go.set()
            await asyncio.gather(*tasks, return_exceptions=True)
    assert len(names) == 17
    assert all(name.startswith("lookup") for name in names)


async def test_a_request_fetches_a_few_at_a_time_so_that_others_of_its_tenant_have_turns_S18() -> None:
    under_way = most = 0

    async def fetch(*_: object, **__: object) -> bytes:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return b"a"

    sources = [MediaUrl("image", parse_url(f"https://a.example/{number}"), "here") for number in range(MANY)]
    assert len(await fetch_sources(sources, fetch, ALICE, "execute", lambda _: None, no_pin)) == MANY
    assert most == 8 < FetchLimits().fetches_per_tenant
