"""A worker announces all that it holds, and nobody else has to wait until all of it is taken in."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import cast

import pytest

from semel.core import Digest, FeatureInfo, Layout
from semel.fleet import worker as remote
from semel.fleet.worker import RemoteWorker
from semel.ledger import MAX_BATCH
from semel.wire.events import Event
from semel.wire.messages import Status
from semel.wire.translation import to_status
from semel.wire.zmq import Connected, FrontendLink, LinkSession
from tests.ledger.examples import have
from tests.wire.examples import CONTRACT, digest_of

MESSAGES = 25


class Snapshot:
    """A link over which all announcements of a worker are there already."""

    address = "tcp://nowhere:1"

    def __init__(self, items: int, *, is_over: bool = True) -> None:
        self.items = items
        self.taken = 0
        self.idle = asyncio.Event()
        self.over = asyncio.Event()
        if is_over:
            self.over.set()

    async def __aiter__(self) -> AsyncIterator[Connected | Status]:
        yield Connected(cast("LinkSession", None), CONTRACT)
        info = FeatureInfo("image", 1, Layout((7,)))
        for number in range(MESSAGES):
            self.taken += 1
            first = number * self.items
            told = have(number, {digest_of(item): info for item in range(first, first + self.items)})
            message = to_status(told, 0, 0)
            del told
            yield message
            del message
        self.idle.set()
        await self.over.wait()


async def turns_of_others(link: Snapshot) -> int:
    """How often the event loop came to something else while a snapshot was taken in."""
    turns = 0
    loop = asyncio.get_running_loop()

    def turn() -> None:
        nonlocal turns
        if link.taken < MESSAGES:
            turns += 1
            loop.call_soon(turn)

    loop.call_soon(turn)
    worker = RemoteWorker(cast("FrontendLink", link))
    async with asyncio.timeout(30):
        await worker.run()
    assert worker.holding(digest_of(MESSAGES * link.items - 1)) is not None
    return turns


async def test_others_have_their_turn_after_every_large_announcement() -> None:
    """Control: small ones, of which many are taken in at once."""
    assert await turns_of_others(Snapshot(MAX_BATCH)) >= MESSAGES - 1
    assert await turns_of_others(Snapshot(1)) <= 1


async def test_mutant_a_reader_that_counts_messages_takes_in_the_whole_snapshot_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "_TURN", MAX_BATCH)
    assert await turns_of_others(Snapshot(MAX_BATCH)) <= 1


class Keeping(RemoteWorker):
    """Mutant: the last message stays until the next one comes."""

    async def _on_event(self, event: Event | Connected) -> None:
        self.last = event
        await super()._on_event(event)


@pytest.mark.parametrize("kind", [RemoteWorker, Keeping], ids=["shipped", "mutant"])
async def test_a_snapshot_leaves_nothing_that_the_garbage_collector_walks(kind: type[RemoteWorker]) -> None:
    """Or collections stop the event loop for as long as there are items: 0.25 s for six million of them."""
    before = _digests()
    link = Snapshot(MAX_BATCH, is_over=False)
    worker = kind(cast("FrontendLink", link))
    running = asyncio.create_task(worker.run())
    async with asyncio.timeout(30):
        await link.idle.wait()
    left = _digests() - before
    link.over.set()
    await running
    assert worker.holding(digest_of(MESSAGES * MAX_BATCH - 1)) is not None
    assert left == (0 if kind is RemoteWorker else MAX_BATCH)
    assert not gc.is_tracked(worker._ledger._announced._infos)
    assert gc.is_tracked({digest_of(1): info for info in [FeatureInfo("image", 1, Layout((7,)))]}), "control"


def _digests() -> int:
    return sum(type(one) is Digest for one in gc.get_objects())
