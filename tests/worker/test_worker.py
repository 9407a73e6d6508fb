"""Workers and frontends over real sockets, with an engine that answers from the very bytes it was given."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, Self

import pytest

from semel.core import Digest, Feature, Submission
from semel.errors import RequestError, ServiceError, WorkerLost
from semel.fleet.stream import RemoteStream
from semel.fleet.worker import RemoteWorker
from semel.lab.testing.engine import EchoStream
from semel.wire.messages import Status
from semel.wire.translation import to_submit
from semel.wire.zmq import LinkSession
from semel.wire.zmq import listener as listener_module
from semel.worker import worker as worker_module
from semel.worker.requests import Request
from semel.worker.worker import Worker
from tests.effort import examples
from tests.waiting import until
from tests.wire.examples import digest_of
from tests.worker.pairing import ITEM_BYTES, Frontend, Rig, expected, feature, prompt, rig

SENT = "semel_features_sent_total"


@pytest.fixture(params=["frames", "memory"])
async def three(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    """Three frontends, an engine of four items; features travel in frames or lie in shared memory."""
    shared = 6 if request.param == "memory" else None
    async with rig(tmp_path, frontends=3, shared_items=shared) as made:
        yield made


async def test_an_item_that_one_has_sent_is_a_reference_from_all_thereafter_D1_D2_D3(three: Rig) -> None:
    first, *others = three.frontends
    assert await first.ask(1) == expected([1])
    for frontend in others:
        await three.knows(frontend, 1)
        assert await frontend.ask(1, 1) == expected([1, 1])
        assert frontend.made == []
        assert frontend.metric(SENT) == 0
        assert frontend.metric("semel_feature_saved_bytes_total") == ITEM_BYTES
    assert first.metric(SENT) == 1


async def test_what_the_engine_has_evicted_is_sent_again_without_asking_D2(three: Rig) -> None:
    first, second, _ = three.frontends
    for number in range(5):
        await first.ask(number)
    await three.knows(second, 1, 2, 3, 4)
    assert second.worker.holding(digest_of(0)) is None
    assert await second.ask(0) == expected([0])
    assert three.worker.needs == 0


async def test_a_wrong_guess_is_repaired_and_nobody_sees_it_D3(three: Rig) -> None:
    first, second, _ = three.frontends
    await first.ask(1)
    await three.knows(second, 1)
    # The engine gives the item up; the second frontend submits before it can hear of that.
    asking = asyncio.create_task(second.ask(1, 2))
    await asyncio.sleep(0)
    await three.engine.reset()
    assert await asking == expected([1, 2])
    assert three.worker.needs == 1
    assert second.metric("semel_features_repaired_total") == 1
    assert sorted(second.made) == [1, 2]


async def test_an_item_that_the_engine_lost_behind_our_back_is_submitted_again_with_its_data_D3(three: Rig) -> None:
    first, second, _ = three.frontends
    await first.ask(1)
    await three.knows(second, 1)
    three.engine.lost.add(digest_of(1))
    assert await second.ask(1) == expected([1])
    assert three.worker.resubmissions == 1


async def test_what_a_client_sent_counts_once_also_if_the_engine_had_lost_it_D8(three: Rig) -> None:
    first, second, _ = three.frontends
    await first.ask(1)
    await three.knows(second, 1)
    three.engine.lost.add(digest_of(1))
    assert await second.ask(1, 2, 1, of_client=True) == expected([1, 2, 1])
    assert three.worker.resubmissions == 1
    assert (three.engine.client_queries, three.engine.client_hits) == (3, 2)


async def test_an_item_larger_than_the_engine_s_cache_rides_with_each_request_D4(tmp_path: Path) -> None:
    async with rig(tmp_path, items=0) as none:
        (frontend,) = none.frontends
        for _ in range(3):
            assert await frontend.ask(1, 2, 1) == expected([1, 2, 1])
        assert frontend.metric(SENT) == 6
        assert none.worker.needs == 0
        assert frontend.metric("semel_mm_cache_queries_total") == 0


async def test_a_refused_request_leaves_no_trace_D3(three: Rig) -> None:
    for frontend in three.frontends:
        with pytest.raises(RequestError, match="as asked"):
            await frontend.ask(1, refuse=True)
    assert len(three.engine) == 0
    assert await three.frontends[0].ask(1) == expected([1])


async def test_a_request_may_count_on_what_another_one_is_sending_even_if_that_is_aborted_D3(three: Rig) -> None:
    frontend = three.frontends[0]
    three.engine.pause_s = 0.02
    first = asyncio.create_task(frontend.ask(1))
    while not frontend.made:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    second = asyncio.create_task(frontend.ask(1, 2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == expected([1, 2])


async def test_the_operator_s_reset_clears_both_sides_with_requests_in_flight_D5(three: Rig) -> None:
    three.engine.pause_s = 0.01
    asking = [asyncio.create_task(one.ask(*range(n, n + 3))) for one in three.frontends for n in range(3)]
    await until(lambda: three.engine.submissions >= 3)
    await three.worker.reset()
    for task, n in zip(asking, [0, 1, 2] * 3, strict=True):
        assert await task == expected(range(n, n + 3))
    await three.worker.reset()
    await until(lambda: all(one.worker.holding(digest_of(n)) is None for one in three.frontends for n in range(5)))


async def test_a_feature_that_cannot_be_made_again_fails_its_request_and_no_other_D3(three: Rig) -> None:
    first, second, _ = three.frontends
    await first.ask(1)
    await three.knows(second, 1)

    async def cannot(_: object) -> None:
        raise ServiceError("the media is gone")

    second.make = cannot  # type: ignore[assignment, method-assign]
    asking = asyncio.create_task(second.ask(1))
    await asyncio.sleep(0)
    await three.engine.reset()
    with pytest.raises(ServiceError, match="the media is gone"):
        await asking
    assert await first.ask(1) == expected([1])


@dataclass
class Tap:
    """What went over the links, by request: from this alone follows what has to be counted (D8)."""

    submitted: dict[str, Counter[Digest]] = field(default_factory=dict)
    travelled: set[tuple[str, Digest]] = field(default_factory=set)
    sent: int = 0

    @classmethod
    @contextmanager
    def on(cls) -> Iterator[Self]:
        tap = cls()
        send, send_feature = RemoteWorker._send, RemoteWorker._send_feature

        def submitting(
            self: RemoteWorker,
            session: LinkSession,
            submission: Submission,
            digests: list[Digest],
            stream: RemoteStream,
        ) -> None:
            tap.submitted[submission.request_id] = Counter(item.digest for item in submission.prompt.items)
            send(self, session, submission, digests, stream)

        def sending(
            self: RemoteWorker, session: LinkSession, stream: RemoteStream, digest: Digest, feature: Feature
        ) -> None:
            tap.travelled.add((stream.request_id, digest))
            tap.sent += 1
            send_feature(self, session, stream, digest, feature)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RemoteWorker, "_send", submitting)
            patch.setattr(RemoteWorker, "_send_feature", sending)
            yield tap

    @property
    def queries(self) -> int:
        return sum(items.total() for items in self.submitted.values())

    @property
    def hits(self) -> int:
        return sum(
            count
            for request, items in self.submitted.items()
            for digest, count in items.items()
            if (request, digest) not in self.travelled
        )


async def check_counts_under_random_load(three: Rig, rounds: int) -> None:
    """Ten requests at a time: a tenth is refused, a tenth aborted, items are evicted, and everything is reset."""
    rng = random.Random(7)
    three.engine.pause_s = 0.0005
    dropped = 0

    async def one() -> None:
        nonlocal dropped
        frontend = rng.choice(three.frontends)
        numbers = rng.choices(range(12), k=rng.randint(1, 3))
        fate = rng.random()
        task = asyncio.create_task(frontend.ask(*numbers, refuse=fate < 0.1))
        if fate > 0.9:
            await asyncio.sleep(rng.random() * 0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            dropped += 1
        elif fate < 0.1:
            with pytest.raises(RequestError):
                await task
        else:
            assert await task == expected(numbers)

    async def reset() -> None:
        await asyncio.sleep(rng.random() * 0.005)
        await three.worker.reset()

    with Tap.on() as tap:
        for number in range(rounds):
            others = [reset()] if number % 4 == 2 else []
            await asyncio.gather(*(one() for _ in range(10)), *others)
            assert three.engine.nbytes <= three.engine.contract.cache_bytes
    queries = sum(one.metric("semel_mm_cache_queries_total") for one in three.frontends)
    hits = sum(one.metric("semel_mm_cache_hits_total") for one in three.frontends)
    sent = sum(one.metric(SENT) for one in three.frontends)
    assert (queries, hits, sent) == (tap.queries, tap.hits, tap.sent)
    assert dropped
    assert 0 < hits < queries


async def test_under_random_load_every_answer_is_right_and_counts_are_exact_D8(three: Rig) -> None:
    await check_counts_under_random_load(three, rounds=examples(40))


class _Unrepaired(set[Digest]):
    """Takes nothing more."""

    def add(self, _: Digest) -> None:
        pass


ABORT, RESET, REPAIR = RemoteWorker.abort, Worker.reset, RemoteWorker._repair


async def test_a_mutant_that_counts_no_aborted_request_is_found_D8(three: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a range of counts, as wide as the number of aborted requests, has let pass."""

    def abort(self: RemoteWorker, stream: RemoteStream) -> None:
        ABORT(self, stream)
        stream.items.clear()

    monkeypatch.setattr(RemoteWorker, "abort", abort)
    with pytest.raises(AssertionError):
        await check_counts_under_random_load(three, rounds=6)


async def test_a_mutant_whose_reset_loses_counts_is_found_D8(three: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def reset(self: Worker) -> None:
        await RESET(self)
        for one in three.frontends:
            one.lookups._counts.clear()

    monkeypatch.setattr(Worker, "reset", reset)
    with pytest.raises(AssertionError):
        await check_counts_under_random_load(three, rounds=6)


async def test_a_mutant_that_counts_a_repaired_item_as_a_hit_is_found_D8(
    three: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def repair(self: RemoteWorker, stream: RemoteStream, digests: tuple[Digest, ...]) -> None:
        stream.sent = _Unrepaired(stream.sent)
        REPAIR(self, stream, digests)

    monkeypatch.setattr(RemoteWorker, "_repair", repair)
    with pytest.raises(AssertionError):
        await check_counts_under_random_load(three, rounds=12)


async def test_a_mutant_that_counts_an_item_shown_twice_once_is_found_D8(
    three: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        RemoteStream, "lookups", lambda self: ((item.modality, 1, item.digest not in self.sent) for item in self.items)
    )
    with pytest.raises(AssertionError):
        await check_counts_under_random_load(three, rounds=6)


async def test_nothing_is_left_when_all_is_answered_D3(three: Rig) -> None:
    await check_counts_under_random_load(three, rounds=10)

    def intake_bytes() -> float:
        return next(value for metric, value, _ in three.worker.samples() if metric.name == "semel_intake_bytes")

    await until(lambda: intake_bytes() == 0)
    await three.engine.reset()
    gc.collect()
    await until(lambda: not any(one.memory.leases for one in three.frontends if one.memory is not None))


class _KeepsItsTask(Request):
    def __setattr__(self, name: str, value: object) -> None:
        if name != "task" or value is not None:
            super().__setattr__(name, value)


@pytest.mark.parametrize("is_mutant", [False, True])
async def test_a_request_that_is_cancelled_lets_its_features_go_without_a_garbage_collection_D4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_mutant: bool
) -> None:
    """A worker seldom collects. The mutant's task has its cancellation, whose frames have the request with the task."""
    if is_mutant:
        monkeypatch.setattr(worker_module, "Request", _KeepsItsTask)
    async with rig(tmp_path, shared_items=6) as made:
        (frontend,) = made.frontends
        memory, submitted = frontend.memory, asyncio.Event()
        assert memory is not None

        async def submit(_: Submission) -> EchoStream:
            submitted.set()
            return await asyncio.Future()

        monkeypatch.setattr(made.engine, "submit", submit)
        gc.disable()
        try:
            asking = asyncio.create_task(frontend.ask(1))
            await submitted.wait()
            assert memory.leases == 1
            asking.cancel()
            with pytest.raises(TimeoutError) if is_mutant else nullcontext():
                await until(lambda: memory.leases == 0, within_s=1.0 if is_mutant else 20.0)
        finally:
            gc.enable()


class _SlowlyClosed(EchoStream):
    """Its abort takes two turns of the loop."""

    async def close(self) -> None:
        await asyncio.sleep(0)
        await super().close()


@pytest.mark.parametrize("is_mutant", [False, True])
async def test_a_second_cancellation_does_not_lose_the_abort_and_a_complete_answer_needs_no_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_mutant: bool
) -> None:
    """The mutant closes an answer that is not complete as it closes a complete one."""
    shielded: list[object] = []
    shield = asyncio.shield

    def count(closing: Any) -> Any:
        shielded.append(closing)
        return closing if is_mutant else shield(closing)

    monkeypatch.setattr(asyncio, "shield", count)
    async with rig(tmp_path) as made:
        (frontend,) = made.frontends
        assert await frontend.ask() == expected([])
        assert shielded == []
        streams: list[_SlowlyClosed] = []

        async def submit(_: Submission) -> EchoStream:
            streams.append(_SlowlyClosed(made.engine, (1, 2), []))
            return streams[0]

        monkeypatch.setattr(made.engine, "submit", submit)
        made.engine.pause_s = 60.0
        stream = await frontend.submit()
        (task,) = made.worker._tasks()
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        await asyncio.sleep(0)
        assert len(shielded) == 1
        assert streams[0].closed is not is_mutant
        await stream.close()


@pytest.mark.parametrize("frontends", [1, 2])
async def test_of_a_text_an_only_frontend_hears_nothing_but_the_answer_with_its_acceptance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frontends: int
) -> None:
    """Control: each of two frontends is told the load of both. An acceptance alone would come in an hour."""
    monkeypatch.setattr(listener_module, "_LAZY_S", 3600.0)
    async with rig(tmp_path, frontends=frontends) as made:
        await until(lambda: all(one.worker._settled.is_set() for one in made.frontends))
        statuses: list[object] = []
        monkeypatch.setattr(made.listener, "send_all", lambda peers, status: statuses.append((peers, status)))
        for _ in range(5):
            assert await made.frontends[0].ask() == expected([])
        made.engine.pause_s = 3600.0
        asking = asyncio.create_task(made.frontends[0].ask())
        await until(lambda: made.worker._running == 1)
        if frontends == 1:
            assert made.worker._publisher._updates.due == inf
        else:
            await until(lambda: bool(statuses))
        assert (statuses == []) is (frontends == 1)
        assert made.frontends[0].worker.load == 1
        asking.cancel()


async def test_with_shared_memory_no_tensor_byte_passes_through_a_socket_D4(tmp_path: Path) -> None:
    async with rig(tmp_path, frontends=2, shared_items=6) as made:
        for frontend in made.frontends:
            for number in range(6):
                assert await frontend.ask(number) == expected([number])
        ways = {
            sample.labels["way"]: sample.value
            for frontend in made.frontends
            for family in frontend.meter.registry.collect()
            for sample in family.samples
            if sample.name == "semel_feature_sent_bytes_total"
        }
        assert ways.keys() == {"memory"}


def ways(frontend: Frontend) -> set[str]:
    """How features have gone to the worker."""
    families = frontend.meter.registry.collect()
    return {one.labels["way"] for family in families for one in family.samples if one.name == SENT}


async def answered(frontend: Frontend, given: Feature) -> tuple[int, ...]:
    """The tokens of an answer to the first item, whose feature is at hand."""
    submission = Submission("given", prompt([1]), {digest_of(1): given}, {})
    async with asyncio.timeout(20):
        stream = await frontend.worker.submit(submission, frontend.make)
        tokens = tuple([token async for output in stream for token in output.token_ids])
        await stream.close()
    return tokens


async def test_a_feature_that_does_not_lie_in_shared_memory_goes_in_frames_and_takes_no_room_there_D4(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, shared_items=6) as made:
        (frontend,) = made.frontends
        assert frontend.memory is not None
        assert await answered(frontend, feature(1)) == expected([1])
        assert (ways(frontend), len(frontend.memory), frontend.memory.occupied) == ({"frames"}, 0, 0)


async def test_a_feature_that_was_evicted_while_it_was_at_hand_is_lent_where_it_lies_D4(tmp_path: Path) -> None:
    async with rig(tmp_path, shared_items=6) as made:
        (frontend,) = made.frontends
        assert frontend.memory is not None
        lying = frontend.memory.put(digest_of(1), feature(1))
        frontend.memory.discard(digest_of(1))
        assert await answered(frontend, lying) == expected([1])
        assert (ways(frontend), len(frontend.memory)) == ({"memory"}, 1)


async def test_a_feature_is_lent_in_the_order_in_which_it_lies_D4(tmp_path: Path) -> None:
    """A client may send the same tensors in another order."""
    async with rig(tmp_path, shared_items=6) as made:
        (frontend,) = made.frontends
        assert frontend.memory is not None
        lying = frontend.memory.put(digest_of(1), feature(1))
        turned = replace(lying, tensors=dict(reversed([*feature(1).tensors.items()])))
        assert await answered(frontend, turned) == expected([1])
        assert ways(frontend) == {"memory"}


async def test_a_frontend_that_breaks_a_rule_loses_its_session_and_the_others_go_on(three: Rig) -> None:
    first, second, _ = three.frontends
    three.engine.pause_s = 0.05
    running = await first.submit(1)
    session = first.worker._session
    assert session is not None
    session.send(to_submit(Submission(running.request_id, prompt([2]), {})))
    with pytest.raises(WorkerLost):
        _ = [output async for output in running]
    assert await second.ask(1) == expected([1])
    await until(lambda: first.worker.is_connected)
    assert await first.ask(1) == expected([1])


async def test_a_worker_that_breaks_a_rule_loses_its_session_and_is_found_again(three: Rig) -> None:
    first, second, _ = three.frontends
    peer = next(peer for peer in three.listener.peers if peer.frontend_id == "f0")
    three.listener.send(peer, Status(99, 100, 0, 0))
    await until(lambda: not first.worker.is_connected)
    await until(lambda: first.worker.is_connected)
    assert await first.ask(1) == expected([1])
    assert await second.ask(1) == expected([1])


async def test_a_worker_that_leaves_is_not_ready_and_takes_requests_until_it_drains(three: Rig) -> None:
    """Control: one that drains is not chosen any more, in the moment in which it says so."""
    frontend, *_ = three.frontends
    assert three.worker.reason == ""
    three.worker.leave()
    assert three.worker.reason == "the worker is shutting down"
    assert await frontend.ask(1) == expected([1])
    assert frontend.worker.is_connected
    await three.worker.drain(0)
    await until(lambda: not frontend.worker.is_connected)
