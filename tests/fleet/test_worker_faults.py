"""Workers that fail: who gets the request then, what counts against whom, and when a worker gets no more of them."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from semel.core import Digest, Feature, Submission
from semel.errors import (
    EngineFailed,
    FeatureRejected,
    NotReady,
    ProtocolError,
    RequestError,
    SemelError,
    ServiceError,
    WorkerLost,
    told_kinds,
)
from semel.fleet.fleet import Fleet
from semel.fleet.membership import Membership
from semel.fleet.retry_policy import is_worker_fault
from semel.fleet.stream import BufferedAnswer, RemoteStream, StreamedAnswer
from semel.fleet.worker import RemoteWorker
from semel.lab.testing.engine import EngineFault
from semel.wire.messages import Need, Status
from tests.fleet.test_membership import connect
from tests.fleet.workers import Workers, several
from tests.waiting import until
from tests.wire.examples import CONTRACT, digest_of
from tests.worker.pairing import expected, prompt


class Sender:
    """A worker to which nothing goes."""

    contract = CONTRACT

    def abort(self, stream: RemoteStream) -> None: ...

    def forget(self, stream: RemoteStream) -> None: ...


class Remembering(RemoteStream):
    """Mutant: it keeps its error when it is closed."""

    async def close(self) -> None:
        error = self._error
        await super().close()
        self._error = error


KINDS = (StreamedAnswer, BufferedAnswer)


@pytest.fixture
async def three(tmp_path: Path) -> AsyncIterator[Workers]:
    async with several(tmp_path, "abc") as rigs:
        yield Workers(rigs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["submission", "first_token"])
async def test_a_request_that_fails_before_its_first_token_is_answered_by_another_worker(
    three: Workers, fault: EngineFault, kind: type[StreamedAnswer]
) -> None:
    """Control: to the worker by itself, which is what everybody got before, the same request is an error."""
    bad = three.fleet.workers[0]
    three.rig_of(bad).engine.fault = fault
    with pytest.raises(EngineFailed):
        await three.rig_of(bad).frontends[0].ask(1)
    queries = three.queries
    assert await three.ask(bad, kind) == expected([1])
    assert three.queries == queries + 1, "D8"
    assert three.metric("semel_failovers_total") == 1


async def test_a_stream_that_has_begun_ends_with_the_error_and_a_whole_answer_begins_anew(three: Workers) -> None:
    bad = three.fleet.workers[0]
    three.rig_of(bad).engine.fault = "second_token"
    with pytest.raises(EngineFailed):
        await three.ask(bad)
    assert await three.ask(bad, BufferedAnswer) == expected([1])


async def test_three_failures_in_a_row_eject_a_worker_and_a_trial_brings_it_back(three: Workers) -> None:
    bad = three.fleet.workers[0]
    engine = three.rig_of(bad).engine
    engine.fault = "first_token"
    for _ in range(3):
        assert bad in three.available
        assert await three.ask(bad) == expected([1])
    assert three.ejected == [bad]
    assert three.metric("semel_worker_ejections_total") == 1
    before = engine.submissions
    for number in range(40):
        await three.ask(number=number)
    assert engine.submissions == before, "nobody is sent there"
    three.now = 10.0
    assert bad in three.available
    assert await three.ask(bad) == expected([1]), "a trial that fails goes elsewhere too"
    three.now = 29.9
    assert bad not in three.available, "20 s this time"
    three.now, engine.fault = 30.0, None
    assert await three.ask(bad) == expected([1])
    assert three.ejected == []


@pytest.mark.parametrize(
    ("sampling", "error"), [({"refuse": True}, RequestError), ({"fail": "first_token"}, EngineFailed)]
)
async def test_a_client_cannot_have_workers_ejected(
    three: Workers, sampling: dict[str, object], error: type[SemelError]
) -> None:
    """A request that is refused, and one that every engine fails on. Control: a request that one worker fails on."""
    for _ in range(30):
        with pytest.raises(error):
            await three.ask(sampling=sampling)
    assert three.ejected == []
    assert three.metric("semel_worker_ejections_total") == 0
    bad = three.fleet.workers[0]
    three.rig_of(bad).engine.fault = "first_token"
    for _ in range(3):
        await three.ask(bad)
    assert three.ejected == [bad]


async def test_a_worker_that_is_lost_before_the_first_token_has_failed(three: Workers) -> None:
    lost = three.fleet.workers[0]
    one = three.rig_of(lost)
    one.engine.pause_s = 0.2
    asking = [asyncio.create_task(three.ask(lost)) for _ in range(3)]
    await until(lambda: len(lost._streams) == 3)
    for peer in one.listener.peers:
        one.listener.close(peer, "lost")
    assert set(await asyncio.gather(*asking)) == {expected([1])}
    assert three.ejected == [lost]


def test_what_is_a_workers_own_fault() -> None:
    faults = {kind for kind in told_kinds() if is_worker_fault(kind("x"))}
    assert {EngineFailed, WorkerLost, ServiceError} <= faults
    assert not faults & {FeatureRejected, NotReady}
    assert not [kind for kind in faults if issubclass(kind, RequestError) or kind.status < 500]


async def test_what_we_fail_on_of_one_worker_ends_its_session_and_nobody_elses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finding 20. Control: the exception left `run`, and the task group of all links ended with it."""
    async with several(tmp_path, frontends=0) as rigs, AsyncExitStack() as stack:
        fleet = Fleet()
        members = Membership(fleet, connect)
        stack.push_async_callback(members.close)
        odd, good = (one.listener.address for one in rigs)
        for address in (odd, good):
            await members.join(address)

        async def no_lists() -> AsyncIterator[list[str]]:
            await asyncio.Event().wait()
            yield []

        running = asyncio.create_task(members.run(no_lists()))
        stack.callback(running.cancel)
        await until(lambda: len(fleet.serving) == 2)
        worker = next(one for one in fleet.workers if one.name == odd)
        peers, other_peers = set(rigs[0].listener.peers), set(rigs[1].listener.peers)
        handle = RemoteWorker._on_event

        async def stumble(self: RemoteWorker, event: object) -> None:
            if self is worker and isinstance(event, Status):
                monkeypatch.setattr(RemoteWorker, "_on_event", handle)
                raise KeyError("a bug")
            await handle(self, event)  # type: ignore[arg-type]

        monkeypatch.setattr(RemoteWorker, "_on_event", stumble)
        rigs[0].listener.broadcast(Status(0, 0, 1, 0))
        await until(lambda: bool(rigs[0].listener.peers) and not peers & set(rigs[0].listener.peers))
        await until(lambda: len(fleet.serving) == 2)
        assert not running.done()
        assert set(rigs[1].listener.peers) == other_peers, "in the same session as before"
        assert odd in caplog.text
        assert "KeyError" in caplog.text


async def test_features_for_a_request_without_items_break_the_protocol(three: Workers) -> None:
    """It is not in the ledger, which would keep what is needed for it for the whole session."""
    worker = next(iter(three.fleet.workers))
    worker._streams["r"] = cast("RemoteStream", SimpleNamespace(items=Counter[object]()))
    with pytest.raises(ProtocolError, match="r, which has no items"):
        worker._on_answer(Need("r", (digest_of(1),)))
    del worker._streams["r"]


@pytest.mark.parametrize("kind", [RemoteStream, Remembering], ids=["shipped", "mutant"])
async def test_a_failed_answer_is_freed_when_it_is_closed(kind: type[RemoteStream]) -> None:
    """With its prompt and its error, and not when the garbage collector walks the oldest of all objects."""

    async def make(_: Digest) -> Feature:
        raise AssertionError

    stream = kind(Submission("r", prompt([1]), {}), make, cast("Any", Sender()))
    freed = weakref.ref(stream)
    gc.disable()
    try:
        stream.break_off(WorkerLost("the engine died"))
        try:
            await stream.until_accepted()
        except WorkerLost:
            pass
        else:
            raise AssertionError
        await stream.close()
        del stream
        assert (freed() is None) == (kind is RemoteStream)
    finally:
        gc.enable()


async def test_who_waits_for_an_answer_that_is_closed_waits_no_more() -> None:
    async def make(_: Digest) -> Feature:
        raise AssertionError

    stream = RemoteStream(Submission("r", prompt([1]), {}), make, cast("Any", Sender()))
    waiting = asyncio.create_task(stream.until_accepted())
    await asyncio.sleep(0)
    stream.break_off(WorkerLost("the engine died"))
    await stream.close()
    with pytest.raises(ServiceError, match="closed"):
        async with asyncio.timeout(10):
            await waiting
