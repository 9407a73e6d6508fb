"""Two workers, three frontends and their clients, all of them real processes.

The tests run in order: the last ones kill and end what the first ones use.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

import semel
from semel.lab.prove.counters import Counts, settled, until_idle
from semel.lab.prove.processes import CACHED_ITEMS, Fleet, Node, running_fleet
from semel.telemetry import metrics
from tests.fleet.features import contract_of, digests_of, features_of
from tests.fleet.oracle import Oracle
from tests.fleet.relay import Relay, relaying
from tests.fleet.segments import Segment, left_of, segments_of
from tests.serve.served import sum_of, until
from tools.fleet.driving import Driver, Reference, Tally, ask_alone, essence, exchange
from tools.fleet.plan import Ask, Chat, Kind, Load, body_of, draw_images, plan

pytestmark = [pytest.mark.engine, pytest.mark.alone, pytest.mark.timeout(900)]

LOAD = Load(requests=1_000)
IMAGES = draw_images(LOAD.images)
FRESH = draw_images(24, seed=1)
"""Images that no load asks for."""

MAX_REFERENCE_BYTES = 200
END_S = 15.0
TURNS = 360


@pytest.fixture(scope="module")
def seen() -> set[Segment]:
    """Shared memory that processes of the fleet had before they were killed or ended."""
    return set()


@pytest.fixture(scope="module")
def fleet(tiny: Callable[[str], Path]) -> Iterator[Fleet]:
    with running_fleet(tiny("qwen2-vl")) as running:
        yield running


@pytest.fixture(scope="module")
async def reference(fleet: Fleet) -> Reference:
    """What is answered to every chat when it is asked alone."""
    return await ask_alone(fleet.urls, LOAD.chats(), IMAGES)


async def test_requests_among_aborted_and_refused_ones_are_answered_as_if_alone_D3(
    fleet: Fleet, reference: Reference
) -> None:
    tally, counts = await _drive(fleet, fleet.running_frontends, reference, LOAD)
    _check_answers(tally, plan(LOAD, 3))
    assert counts.sent_by_memory > 0
    assert (counts.sent_in_frames, counts.frames_bytes) == (0, 0), "tensor bytes went through a socket"
    for worker in fleet.workers:
        assert Counts.read([], [worker]).worker_evictions > 0, f"{worker.name} has evicted nothing: {counts}"
        assert sum_of(worker.metrics(), metrics.MM_CACHE_ITEMS.name) == CACHED_ITEMS


@pytest.mark.parametrize("cache", ["shared", "lru"])
async def test_queries_and_hits_are_those_of_the_items_that_were_asked_for_D8(
    fleet: Fleet, reference: Reference, cache: str
) -> None:
    async with _frontends(fleet, cache) as frontends:
        crowded = replace(LOAD, requests=300, at_once=0.0, seed=1)
        asks = plan(crowded, len(frontends))
        tally, counts = await _drive(fleet, frontends, reference, crowded)
        _check_answers(tally, asks)
        items = sum(len(ask.chat) for ask in asks)
        assert (counts.processor_queries, counts.worker_queries) == (items, items), counts
        assert counts.worker_misses == counts.sent, counts
        assert counts.worker_evictions > 0

        _empty(fleet, frontends)
        roomy = replace(LOAD, requests=300, images=36, at_once=0.0, seed=2)
        asks = plan(roomy, len(frontends))
        chats = await ask_alone(fleet.urls, roomy.chats(), IMAGES)
        _empty(fleet, frontends)
        tally, counts = await _drive(fleet, frontends, chats, roomy)
        _check_answers(tally, asks)
        items = sum(len(ask.chat) for ask in asks)
        assert (counts.processor_queries, counts.worker_queries) == (items, items), counts
        assert (counts.worker_evictions, counts.processor_evictions) == (0, 0), counts
        assert counts.processor_misses == counts.processed + counts.unprocessed + counts.joined, counts
        assert counts.worker_misses == counts.sent, counts
        assert (counts.sent_in_frames if cache == "shared" else counts.sent_by_memory) == 0, counts


async def test_an_oracle_foretells_every_hit_of_requests_one_after_another_D8(fleet: Fleet) -> None:
    """120 images and two caches of 44: many of them are evicted, and come again by another frontend."""
    contract = await contract_of(fleet.addresses[0], fleet.key)
    digests = digests_of(IMAGES, contract, fleet.key)
    frontends = fleet.running_frontends
    _empty(fleet, frontends)
    before = settled(frontends, fleet.workers)
    oracle = Oracle(fleet.addresses, CACHED_ITEMS)
    for turn, image in enumerate(_spaced_turns()):
        frontend = turn % len(frontends)
        status, answer = await exchange(frontends[frontend].url, body_of(Ask((image,), frontend), IMAGES))
        assert status == 200, answer
        oracle.ask(digests[image], frontend)
        await until_idle(frontends)
    counts = settled(frontends, fleet.workers) - before
    assert oracle.evictions > 20
    assert 50 < oracle.worker_hits < oracle.processor_hits < oracle.queries
    assert (counts.processor_queries, counts.worker_queries) == (oracle.queries, oracle.queries)
    assert counts.processor_hits == oracle.processor_hits, (counts, oracle.worker_hits)
    assert counts.worker_hits == oracle.worker_hits, counts
    assert (counts.vllm_queries, counts.vllm_hits) == (oracle.queries, oracle.processor_hits), counts
    assert counts.sent == oracle.queries - oracle.worker_hits, counts
    assert counts.processed == oracle.queries - oracle.processor_hits, counts
    assert counts.worker_evictions == oracle.evictions, counts
    assert counts.needs == 0, counts


async def test_what_one_frontend_has_sent_is_a_reference_from_every_other_one_D1(fleet: Fleet) -> None:
    frontends = fleet.running_frontends
    before = settled(frontends, fleet.workers)
    answers = []
    for frontend in frontends:
        status, answer = await exchange(frontend.url, body_of(Ask((0,), 0), FRESH))
        assert status == 200, answer
        answers.append(essence(answer))
        settled([frontend], [])
    counts = settled(frontends, fleet.workers) - before
    assert answers == answers[:1] * 3
    assert (counts.sent, counts.processed) == (1, 1), counts
    assert (counts.worker_queries, counts.worker_hits, counts.processor_hits) == (3, 2, 2), counts


async def test_injected_items_are_references_from_every_frontend_and_counted_where_they_came_in_D6(
    fleet: Fleet,
) -> None:
    worker, frontends, injected = fleet.workers[0], fleet.running_frontends, FRESH[1:9]
    contract = await contract_of(worker.address, fleet.key)
    features = features_of(injected, fleet.model, contract, fleet.key)
    before = settled(frontends, fleet.workers)
    for expected in ("stored", "held"):
        outcomes = await asyncio.to_thread(semel.inject, worker.url, features, key=fleet.admin_key)
        assert [outcome.status for outcome in outcomes] == [expected] * len(injected), outcomes
    counts = settled(frontends, fleet.workers) - before
    assert (counts.injected_queries, counts.injected_hits) == (2 * len(injected), len(injected)), counts
    assert (counts.processor_queries, counts.worker_queries, counts.sent) == (0, 0, 0), counts
    assert (counts.vllm_queries, counts.vllm_hits) == (counts.injected_queries, counts.injected_hits), counts

    urls = [frontend.url for frontend in frontends]
    chats = [(image,) for image in range(len(injected)) for _ in frontends]
    await ask_alone(urls, chats, injected)
    counts = settled(frontends, fleet.workers) - before
    asked = len(chats)
    assert (counts.processor_queries, counts.processor_hits) == (asked, asked), counts
    assert (counts.worker_queries, counts.worker_hits) == (asked, asked), counts
    assert (counts.sent, counts.processed, counts.needs) == (0, 0, 0), counts


async def test_a_repeat_costs_at_most_200_bytes_on_the_wire_more_than_a_chat_without_its_image_D1(fleet: Fleet) -> None:
    """Measured on the socket itself, by a relay. The least of some: heartbeats and acknowledgements come in between."""
    worker = fleet.workers[0].address
    async with relaying(fleet.home / "relay.sock", worker) as relay:
        frontend = fleet.begin_frontend([relay.address], cache="lru")
        try:
            await asyncio.to_thread(fleet.until_up)
            first, *repeats = [await _bytes_sent(relay, frontend, (20,)) for _ in range(8)]
            plain = [await _bytes_sent(relay, frontend, ()) for _ in range(7)]
        finally:
            await asyncio.to_thread(frontend.end)
    assert first > 18_000, "the image itself did not pass the relay"
    assert min(repeats) - min(plain) <= MAX_REFERENCE_BYTES, (repeats, plain)


async def test_a_frontend_and_a_worker_that_are_killed_fail_nothing_but_what_they_were_answering_D3(
    fleet: Fleet, reference: Reference, seen: set[Segment], capsys: pytest.CaptureFixture[str]
) -> None:
    load = replace(LOAD, requests=900, seed=4)
    doomed, *survivors = fleet.running_frontends
    driver = Driver([node.url for node in (doomed, *survivors)], IMAGES, reference, at_a_time=load.at_a_time)
    driving = asyncio.create_task(driver.run(plan(load, 3)))
    await driver.until_answered(200)
    seen |= segments_of(pid for node in fleet.running for pid in node.family())
    driver.gone.add(doomed.url)
    killed = await asyncio.to_thread(doomed.kill)
    await driver.until_answered(550)
    driver.killed_workers += 1
    killed += await asyncio.to_thread(fleet.workers[1].kill)
    tally = await driving
    lost_with_worker = [told for told in tally.lost if doomed.url not in told]
    with capsys.disabled():
        sys.stdout.write(f"\nlost with the frontend {len(tally.lost) - len(lost_with_worker)}, ")
        sys.stdout.write(f"with the worker {len(lost_with_worker)} {lost_with_worker[:1]}\n")
    assert not tally.failures, "\n".join(tally.failures[:10])
    assert not lost_with_worker, "all of these could be answered by the other worker"
    assert tally.answered == load.requests
    until(lambda: not any(map(psutil.pid_exists, killed)), END_S)

    after = await ask_alone([node.url for node in survivors], LOAD.chats()[:30], IMAGES)
    assert after == {chat: reference[chat] for chat in after}
    for node in survivors:
        assert sum_of(node.metrics(), metrics.WORKER_CONNECTED.name) == 1
        for gauge in (metrics.LEASES, metrics.WORKER_RUNNING):
            until(lambda node=node, gauge=gauge: sum_of(node.metrics(), gauge.name) == 0, END_S)  # type: ignore[misc]
    left = fleet.workers[0].metrics()
    assert sum_of(left, metrics.INTAKE_BYTES.name) == 0
    assert sum_of(left, metrics.MM_CACHE_ITEMS.name) <= CACHED_ITEMS


@pytest.mark.nightly
async def test_with_all_caching_off_everything_is_answered_and_no_counter_moves_D8(
    fleet: Fleet, reference: Reference
) -> None:
    """The worker takes the place of the one that was killed, whose socket still lies there."""
    for node in fleet.running_frontends:
        await asyncio.to_thread(node.end)
    await asyncio.to_thread(fleet.workers[1].kill)  # if the test before has not run
    worker = fleet.begin_worker(cache_gb=0, address=fleet.workers[1].address)
    await asyncio.to_thread(fleet.until_up)
    frontend = fleet.begin_frontend([worker.address], cache_gb=0)
    await asyncio.to_thread(fleet.until_up)
    contract = await contract_of(worker.address, fleet.key)
    features = features_of(FRESH[:4], fleet.model, contract, fleet.key)
    outcomes = await asyncio.to_thread(semel.inject, worker.url, features, key=fleet.admin_key)
    assert {outcome.status for outcome in outcomes} == {"skipped"}
    chats = LOAD.chats()[:20] * 2
    answers = await ask_alone([frontend.url], chats, IMAGES)
    assert answers == {chat: reference[chat] for chat in answers}
    await _drive(fleet, [frontend], reference, replace(LOAD, requests=60, seed=5))
    for node in (frontend, worker):
        lines = [line for line in node.metrics().splitlines() if line.startswith(("semel_mm_cache", "vllm:mm_cache"))]
        lines = [line for line in lines if "_created" not in line]
        assert all(line.endswith(" 0.0") for line in lines), lines


def test_when_all_have_ended_nothing_of_them_is_left(fleet: Fleet, seen: set[Segment]) -> None:
    """The socket of a worker that was killed lies there until another takes its place, which it may have by now."""
    ending = {node.address for node in fleet.running}
    killed = {node.address for node in fleet.workers} - ending
    families = [pid for node in fleet.running for pid in node.family()]
    seen |= segments_of(families)
    assert any(segment.name.startswith("/memfd:semel") for segment in seen)
    fleet.end()
    until(lambda: not any(map(psutil.pid_exists, families)), END_S)
    left = {path for path in fleet.home.iterdir() if path.is_socket()}
    assert {f"ipc://{path}".removesuffix(".memory") for path in left} <= killed
    until(lambda: not left_of(seen), END_S)


async def _drive(fleet: Fleet, frontends: list[Node], reference: Reference, load: Load) -> tuple[Tally, Counts]:
    """A load, and what was counted meanwhile."""
    workers = fleet.running_workers
    before = await asyncio.to_thread(settled, frontends, workers)
    driver = Driver([node.url for node in frontends], IMAGES, reference, at_a_time=load.at_a_time)
    tally = await driver.run(plan(load, len(frontends)))
    return tally, await asyncio.to_thread(settled, frontends, workers) - before


def _check_answers(tally: Tally, asks: list[Ask]) -> None:
    assert not tally.failures, f"{len(tally.failures)} failed:\n" + "\n".join(tally.failures[:10])
    kinds = [ask.kind for ask in asks]
    aborted = kinds.count(Kind.LEFT_AT_ONCE) + kinds.count(Kind.LEFT_EARLY)
    assert (tally.good, tally.refused, tally.aborted) == (kinds.count(Kind.GOOD), kinds.count(Kind.REFUSED), aborted)


@asynccontextmanager
async def _frontends(fleet: Fleet, cache: str) -> AsyncIterator[list[Node]]:
    """Those of the fleet, or three others with another kind of cache."""
    if cache == "shared":
        yield fleet.running_frontends
        return
    frontends = [fleet.begin_frontend(fleet.addresses, cache=cache) for _ in range(3)]
    try:
        await asyncio.to_thread(fleet.until_up)
        yield frontends
    finally:
        for frontend in frontends:
            await asyncio.to_thread(frontend.end)


def _empty(fleet: Fleet, frontends: list[Node]) -> None:
    """Reset all caches, and wait until every one is empty."""
    fleet.reset()
    for node in (*frontends, *fleet.running_workers):
        until(lambda node=node: sum_of(node.metrics(), metrics.MM_CACHE_ITEMS.name) == 0, END_S)  # type: ignore[misc]


def _spaced_turns() -> list[int]:
    """Images in a random order, popular ones again and again, none of them twice within eight turns."""
    rng = np.random.default_rng(3)
    weights = 1 / np.arange(1, len(IMAGES) + 1) ** 0.6
    turns: list[int] = []
    while len(turns) < TURNS:
        image = int(rng.choice(len(IMAGES), p=weights / weights.sum()))
        if image not in turns[-8:]:
            turns.append(image)
    return turns


async def _bytes_sent(relay: Relay, frontend: Node, chat: Chat) -> int:
    """What a frontend sends its worker for a chat."""
    before = relay.sent
    status, answer = await exchange(frontend.url, body_of(Ask(chat, 0), FRESH))
    assert status == 200, answer
    return relay.sent - before
