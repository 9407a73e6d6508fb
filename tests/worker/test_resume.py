"""A session that breaks goes on from where it was; a snapshot is sent as fast as it is read. Real sockets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from semel.core import FeatureInfo, Layout
from semel.ledger import MAX_BATCH
from semel.wire.codec import pack
from semel.wire.limits import Limits
from semel.wire.messages import Status
from semel.wire.zmq import Peer, WorkerListener
from tests.waiting import until
from tests.wire.examples import digest_of
from tests.worker.pairing import Frontend, Rig, expected, rig

INFO = FeatureInfo("image", 1_000, Layout((7,) * 300))
SEND_ALL = WorkerListener.send_all


@contextmanager
def recorded() -> Iterator[list[Status]]:
    """What a worker tells."""
    told: list[Status] = []

    def send_all(self: WorkerListener, peers: Iterable[Peer], status: Status) -> None:
        told.append(status)
        SEND_ALL(self, peers, status)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerListener, "send_all", send_all)
        yield told


async def break_off(made: Rig, frontend: Frontend) -> None:
    """End its session, let something change, and wait for the next one."""
    sessions, session = frontend.worker.sessions, frontend.worker._session
    assert session is not None
    session.reset("cut")
    await until(lambda: not made.listener.peers or frontend.worker.sessions > sessions)
    made.worker._publisher.hold(digest_of(1_000_001), INFO)
    made.worker._publisher.drop(digest_of(1))
    await until(lambda: frontend.worker.sessions > sessions)
    await frontend.worker.until_settled()


def nbytes(told: list[Status]) -> int:
    return sum(len(pack(status, Limits())) for status in told)


async def test_a_session_that_broke_costs_less_than_one_in_a_hundred_of_a_snapshot_D2(tmp_path: Path) -> None:
    """Control: the worker is another process, and everything is told anew."""
    async with rig(tmp_path) as made:
        (frontend,) = made.frontends
        for number in range(1, 2_001):
            made.worker._publisher.hold(digest_of(number), INFO)
        await made.knows(frontend, *range(1, 2_001))
        with recorded() as resumed:
            await break_off(made, frontend)
        assert resumed
        assert all(status.since is not None for status in resumed), "how many there are, a busy machine decides"
        await made.knows(frontend, *range(2, 2_001), 1_000_001)
        assert frontend.worker.holding(digest_of(1)) is None
        made.listener.incarnation = b"another1"
        with recorded() as anew:
            await break_off(made, frontend)
        assert anew[0].since is None
        await made.knows(frontend, *range(2, 2_001), 1_000_001)
        assert nbytes(resumed) <= nbytes(anew) / 100


async def test_a_snapshot_is_sent_in_slices_as_fast_as_it_is_read_and_requests_do_not_wait_for_it_D2(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, frontends=2) as made:
        frontend, other = made.frontends
        for number in range(10_000, 30_000):
            made.worker._publisher.hold(digest_of(number), INFO)
        await made.knows(other, *range(10_000, 30_000))
        sessions, session = frontend.worker.sessions, frontend.worker._session
        assert session is not None
        made.listener.incarnation = b"another1"
        with recorded() as told:
            session.reset("cut")
            await until(lambda: frontend.worker.sessions > sessions and frontend.worker.is_connected)
            assert await frontend.ask(1) == expected([1])
            await frontend.worker.until_settled()
        slices = [status for status in told if len(status.items) > 1]
        assert len(slices) == -(-20_000 // MAX_BATCH)
        await made.knows(frontend, 1, *range(10_000, 30_000))
        await made.knows(other, 1)
