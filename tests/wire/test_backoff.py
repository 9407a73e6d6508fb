"""When a link tries again: soon after a connection broke, seldom after a refusal, at once when something changes."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random

import pytest

from semel.wire import handshake
from semel.wire.events import Reset
from semel.wire.messages import PROTOCOL
from semel.wire.zmq import Backoff, Connected, FrontendLink, WorkerListener
from semel.wire.zmq.backoff import NO_HANDSHAKE, Retries
from semel.wire.zmq.listener import LogLimit
from tests.waiting import until
from tests.wire.examples import CONTRACT, KEY, OTHER_KEY
from tests.wire.test_zmq import end_of, next_at_frontend

BACKOFF = Backoff(first_s=0.01, max_s=0.05)


def delays(code: str, generations: int, count: int) -> list[float]:
    retries, random = Retries(Backoff()), Random(1)
    return [retries.delay_s(code, generations, random) for _ in range(count)]


def test_after_a_refusal_a_link_waits_30_s_and_doubles_that_up_to_300_with_jitter() -> None:
    """Control: a connection that broke."""
    for number, delay in enumerate(delays("protocol", 1, 10)):
        most = min(300.0, 30.0 * 2**number)
        assert most / 2 <= delay <= most
    assert max(delays("gone", 1, 100)) <= 2.0
    assert len(set(delays("protocol", 1, 10)[5:])) == 5


@pytest.mark.parametrize(("code", "generations", "quick"), [("key", 1, 0), ("key", 2, 2), (NO_HANDSHAKE, 2, 12)])
def test_other_keys_and_other_sockets_of_the_worker_are_tried_soon(code: str, generations: int, quick: int) -> None:
    found = delays(code, generations, quick + 1)
    assert all(delay <= 2.0 for delay in found[:-1])
    assert found[-1] >= 15.0


def test_another_reason_and_a_session_end_the_patience() -> None:
    retries, random = Retries(Backoff()), Random(1)
    for _ in range(5):
        retries.delay_s("protocol", 1, random)
    assert retries.delay_s("silence", 1, random) <= 2.0
    assert retries.delay_s("protocol", 1, random) <= 30.0
    retries.reset()
    assert (retries.failures, retries.delay_s("gone", 1, random) <= 0.05) == (0, True)


def test_500_refused_links_make_less_than_10_attempts_a_second() -> None:
    """An attempt takes 2.2 ms of a frontend: 2% of a core."""
    random, attempts = Random(1), 0
    for _ in range(500):
        retries, now = Retries(Backoff()), 0.0
        while (now := now + retries.delay_s("protocol", 1, random)) < 600.0:
            attempts += 1
    assert attempts / 600.0 < 10


async def test_a_worker_of_another_version_is_found_as_soon_as_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: nothing has changed, and it is not asked again."""
    address = f"ipc://{tmp_path}/w"
    async with AsyncExitStack() as place, AsyncExitStack() as stack:
        listener = await place.enter_async_context(WorkerListener(address, key=KEY, contract=CONTRACT))
        with monkeypatch.context() as other:
            other.setattr(handshake, "PROTOCOL", 99)
            link = FrontendLink(address, key=KEY, frontend_id="f1", backoff=BACKOFF)
            await stack.enter_async_context(link)  # it says which version it has when it opens
        assert await end_of(link) == Reset("protocol", f"the worker speaks protocol {PROTOCOL}, the frontend 99")
        with pytest.raises(TimeoutError):
            await end_of(link, 0.5)
        assert listener.refused == {"protocol": 1}
        await place.aclose()
        async with WorkerListener(address, key=KEY, contract=CONTRACT):
            await next_at_frontend(link, Connected, 5.0)


async def test_a_link_with_other_keys_tries_them_at_once(tmp_path: Path) -> None:
    from semel.wire.zmq.address import transport_keys

    address = f"ipc://{tmp_path}/w"
    async with (
        WorkerListener(address, key=KEY, contract=CONTRACT),
        FrontendLink(address, key=OTHER_KEY, frontend_id="f1", backoff=BACKOFF) as link,
    ):
        assert isinstance(await end_of(link), Reset)
        link.replace_keys(transport_keys(KEY, "frontend"))
        await next_at_frontend(link, Connected, 5.0)


async def test_who_is_one_too_many_is_told_why_and_gets_a_place_when_there_is_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"ipc://{tmp_path}/w"
    caplog.set_level(logging.WARNING)
    async with (
        WorkerListener(address, key=KEY, contract=CONTRACT, max_peers=1) as listener,
        AsyncExitStack() as place,
    ):
        first = await place.enter_async_context(FrontendLink(address, key=KEY, frontend_id="f1", backoff=BACKOFF))
        await next_at_frontend(first, Connected)
        async with FrontendLink(address, key=KEY, frontend_id="f2", backoff=BACKOFF) as second:
            told = await end_of(second)
            assert told == Reset("busy", "the worker has 1 frontends, as many as it takes (--max-frontends)")
            await until(lambda: listener.refused["busy"] >= 3)
            assert [one.frontend_id for one in listener.peers] == ["f1"]
            assert caplog.text.count("refused a frontend") < listener.refused["busy"], "at most a line a second"
            await place.aclose()
            await next_at_frontend(second, Connected)


@pytest.mark.parametrize(("code", "level"), [("gone", "INFO"), ("busy", "WARNING")])
async def test_a_frontend_that_left_before_its_session_began_is_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, code: str, level: str
) -> None:
    """Every start has such ones: a frontend tries while its worker loads, and gives up each try."""
    caplog.set_level(logging.INFO)
    async with WorkerListener(f"ipc://{tmp_path}/w", key=KEY, contract=CONTRACT) as listener:
        listener._tell(("", b"frontend"), [Reset(code, "the frontend is gone: Host unreachable")])
    assert [one.levelname for one in caplog.records if "refused a frontend" in one.getMessage()] == [level]


def test_lines_of_one_kind_are_written_once_a_second_and_the_others_counted() -> None:
    limit = LogLimit(1.0)
    assert [limit.take("busy", now) for now in (5.0, 5.1, 5.9, 6.0, 6.1)] == [0, None, None, 2, None]
    assert limit.take("key", 6.1) == 0
