"""Who has a frontend's keys cannot be a worker, and the other way round (threats S17).

The control is the simple way: with one fleet key, both roles are derived from it, and whoever has it can be either.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from semel.core import Key
from semel.errors import ConfigError
from semel.wire.events import Admitted, Reset
from semel.wire.keys import Generation, TransportKeys
from semel.wire.zmq import Backoff, Connected, FrontendLink, WorkerListener
from semel.wire.zmq.address import public_key, transport_keys
from semel.wire.zmq.key_pairs import KeyPairs
from tests.wire.examples import CONTRACT, KEY
from tests.wire.test_zmq import next_at_frontend, next_at_worker

ADDRESS = "tcp://127.0.0.1:*"
DEADLINE_S = 30.0
ATTEMPTS = 4
PAIRS = KeyPairs.make(1_000)
BOTH = PAIRS.rotate(2_000)


def worker_of(stolen: TransportKeys, secret: bytes) -> TransportKeys:
    """The best worker that can be made of a frontend's file: its link key is right, and the secret is what there is."""
    return TransportKeys(
        "worker",
        tuple(Generation(one.number, secret, public_key(one.secret), one.link) for one in stolen.generations),
    )


@asynccontextmanager
async def client(address: str, keys: Key | TransportKeys) -> AsyncIterator[FrontendLink]:
    backoff = Backoff(first_s=0.01, max_s=0.05)
    async with FrontendLink(address, key=keys, frontend_id="honest", backoff=backoff) as link:
        yield link


async def is_refused(link: FrontendLink) -> bool:
    """Whether attempt after attempt fails, with every generation that there is."""
    resets = 0
    async with asyncio.timeout(DEADLINE_S):
        async for event in link:
            if isinstance(event, Connected):
                return False
            if (resets := resets + isinstance(event, Reset)) >= ATTEMPTS:
                return True
    raise AssertionError("the link was closed")


async def is_believed(listening: TransportKeys, frontend: Key | TransportKeys) -> bool:
    """Whether an honest frontend opens a session with whoever listens."""
    async with (
        WorkerListener(ADDRESS, key=listening, contract=CONTRACT) as listener,
        client(listener.address, frontend) as link,
    ):
        return not await is_refused(link)


@pytest.mark.parametrize("pairs", [PAIRS, BOTH], ids=["one generation", "during a rotation"])
async def test_a_frontends_secrets_cannot_open_a_workers_listener_S17(pairs: KeyPairs) -> None:
    async with (
        WorkerListener(ADDRESS, key=pairs.worker, contract=CONTRACT) as listener,
        client(listener.address, pairs.frontend) as link,
    ):
        await next_at_frontend(link, Connected, timeout_s=DEADLINE_S)
    for secret in (pairs.frontend.newest.secret, pairs.frontend.newest.link.secret, pairs.frontend.newest.peer):
        assert not await is_believed(worker_of(pairs.frontend, secret), pairs.frontend)
    with pytest.raises(ConfigError, match="transport keys of a frontend, and this is a worker"):
        WorkerListener(ADDRESS, key=pairs.frontend, contract=CONTRACT)


async def test_control_with_one_fleet_key_a_frontend_can_be_a_worker() -> None:
    """The naive way: what a frontend has to have is all that a worker needs."""
    assert await is_believed(transport_keys(KEY, "worker"), KEY)


async def test_a_workers_secrets_cannot_be_a_frontend_at_another_worker_S17() -> None:
    stolen = PAIRS.worker.newest
    thief = TransportKeys(
        "frontend", (Generation(1, stolen.secret, public_key(stolen.secret), stolen.link),)
    )  # it knows the workers' public key, and has a secret, which is not a frontend's
    async with (
        WorkerListener(ADDRESS, key=PAIRS.worker, contract=CONTRACT) as listener,
        client(listener.address, thief) as link,
    ):
        assert await is_refused(link)
        assert listener.peers == ()
        async with client(listener.address, PAIRS.frontend):
            await next_at_worker(listener, Admitted, timeout_s=DEADLINE_S)


async def test_keys_of_two_generations_are_not_mixed_S17() -> None:
    """A socket of a new generation takes only frontends of that generation, so a retired secret opens nothing."""
    old, new = BOTH.frontend.generations
    mixed = TransportKeys("frontend", (Generation(2, old.secret, new.peer, new.link),))
    async with (
        WorkerListener(ADDRESS, key=BOTH.worker, contract=CONTRACT) as listener,
        client(listener.address, mixed) as link,
    ):
        assert await is_refused(link)
        assert listener.peers == ()
