"""Transport keys are replaced while sockets are open: what is accepted stays, what is not ends."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from semel.errors import ConfigError
from semel.wire.events import Admitted, Reset
from semel.wire.keys import TransportKeys
from semel.wire.messages import Accepted
from semel.wire.zmq import Backoff, Connected, FrontendLink, WorkerListener
from semel.wire.zmq.key_pairs import KeyPairs
from tests.waiting import until
from tests.wire.examples import CONTRACT
from tests.wire.test_zmq import end_of, next_at_frontend, next_at_worker

OLD = KeyPairs.make(1_000)
BOTH = OLD.rotate(2_000)
NEW = BOTH.retire()
SOON = Backoff(first_s=0.01, max_s=0.05)


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/w" if request.param == "ipc" else "tcp://127.0.0.1:*"


def listen(address: str, keys: TransportKeys) -> WorkerListener:
    return WorkerListener(address, key=keys, contract=CONTRACT)


def link_to(listener: WorkerListener, keys: TransportKeys, *, newest_only: bool = False) -> FrontendLink:
    return FrontendLink(listener.address, key=keys, frontend_id="f1", backoff=SOON, newest_only=newest_only)


async def test_a_rotation_leaves_links_alone_and_both_generations_get_in(address: str) -> None:
    async with listen(address, OLD.worker) as listener, link_to(listener, OLD.frontend) as before:
        assert (await next_at_frontend(before, Connected)).generation == 1
        peer, _ = await next_at_worker(listener, Admitted)
        listener.replace_keys(BOTH.worker)
        assert listener.generations == {1: 1, 2: 0}
        async with link_to(listener, OLD.frontend) as late, link_to(listener, BOTH.frontend, newest_only=True) as early:
            assert (await next_at_frontend(late, Connected)).generation == 1
            assert (await next_at_frontend(early, Connected)).generation == 2
            await until(lambda: listener.generations == {1: 2, 2: 1})
            listener.send(peer, Accepted("r1"))
            assert await next_at_frontend(before, Accepted) == Accepted("r1"), "in the session that there was"


async def test_retired_keys_end_their_links_and_no_others_and_get_in_no_more(address: str) -> None:
    async with listen(address, BOTH.worker) as listener:
        async with link_to(listener, OLD.frontend) as old, link_to(listener, BOTH.frontend, newest_only=True) as new:
            await next_at_frontend(old, Connected)
            connected = await next_at_frontend(new, Connected)
            await until(lambda: listener.generations == {1: 1, 2: 1})
            listener.replace_keys(NEW.worker)
            ended = await end_of(old)
            assert isinstance(ended, Reset)
            assert ended.code == "key"
            assert "not accepted any more" in ended.message
            with pytest.raises(TimeoutError):
                await next_at_frontend(old, Connected, timeout_s=0.5)
            assert listener.generations == {2: 1}
            assert connected.session.is_open
        gone = {(await next_at_worker(listener, Reset))[0].generation}
        assert gone == {1}, "the worker is told, too"


async def test_a_frontend_leaves_a_worker_whose_keys_are_retired(address: str) -> None:
    """Whoever has stolen a worker's old keys is left as well."""
    async with listen(address, OLD.worker) as thief, link_to(thief, BOTH.frontend) as link:
        assert (await next_at_frontend(link, Connected)).generation == 1
        link.replace_keys(NEW.frontend)
        assert isinstance(await end_of(link), Reset)
        with pytest.raises(TimeoutError):
            await next_at_frontend(link, Connected, timeout_s=0.5)


async def test_a_frontend_with_newer_keys_than_its_worker_gets_in_and_takes_the_newer_when_they_are_there(
    address: str,
) -> None:
    async with listen(address, OLD.worker) as listener, link_to(listener, BOTH.frontend) as link:
        assert (await next_at_frontend(link, Connected)).generation == 1
        async with link_to(listener, BOTH.frontend, newest_only=True) as second:
            with pytest.raises(TimeoutError):
                await next_at_frontend(second, Connected, timeout_s=0.3)
            listener.replace_keys(BOTH.worker)
            assert (await next_at_frontend(second, Connected)).generation == 2


async def test_keys_that_are_made_anew_under_the_same_number_are_other_keys(address: str) -> None:
    other = KeyPairs.make(1_000)
    async with listen(address, OLD.worker) as listener, link_to(listener, OLD.frontend) as link:
        await next_at_frontend(link, Connected)
        listener.replace_keys(other.worker)
        assert isinstance(await end_of(link), Reset)
        async with link_to(listener, other.frontend) as new:
            await next_at_frontend(new, Connected)


async def test_no_other_program_has_the_port_of_a_worker_and_no_second_worker_either() -> None:
    async with listen("tcp://127.0.0.1:*", BOTH.worker) as listener:
        port = int(listener.address.rpartition(":")[2])
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port))
        with pytest.raises(ConfigError, match=r"cannot listen on .* in use"):
            async with listen(listener.address, BOTH.worker):
                raise AssertionError("two workers share a port")


async def test_a_worker_that_cannot_listen_with_new_keys_goes_on_with_those_it_has() -> None:
    async with listen("tcp://127.0.0.1:*", OLD.worker) as listener:
        with pytest.raises(ConfigError, match="keys of a frontend"):
            listener.replace_keys(BOTH.frontend)
        async with link_to(listener, OLD.frontend) as link:
            await next_at_frontend(link, Connected)
        assert listener.generations.keys() == {1}
