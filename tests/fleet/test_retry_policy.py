"""Several workers behind one frontend, over real sockets: which one answers, and what happens when it is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from semel.core import Contract, Digest, Feature, Submission
from semel.errors import NotReady, WorkerLost
from semel.fleet.compatibility import Difference
from semel.fleet.fleet import Fleet
from semel.fleet.retry_policy import FleetHealth
from semel.fleet.stream import BufferedAnswer, StreamedAnswer
from semel.fleet.worker import RemoteWorker
from semel.wire.events import Reset
from semel.wire.limits import Deadlines
from semel.wire.zmq import Backoff, FrontendLink, WorkerListener
from tests.fleet.unlinked import UnlinkedWorker
from tests.fleet.workers import Workers, several, standing
from tests.waiting import until
from tests.wire.examples import CONTRACT, KEY, digest_of
from tests.worker.pairing import Rig, expected, feature, prompt


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Workers]:
    async with several(tmp_path) as rigs:
        yield Workers(rigs)


async def tokens(stream: StreamedAnswer) -> tuple[int, ...]:
    async with asyncio.timeout(10):
        return tuple([token async for output in stream for token in output.token_ids])


async def lose(one: Rig) -> None:
    """Let the worker's end of all sessions go."""
    for peer in one.listener.peers:
        one.listener.close(peer, "lost")
    await asyncio.sleep(0)


@pytest.mark.parametrize("is_begun", [False, True], ids=["read at once", "its first output waited for, as of a file"])
async def test_a_request_whose_worker_is_lost_before_its_first_output_is_answered_by_another_D3(
    two: Workers, caplog: pytest.LogCaptureFixture, is_begun: bool
) -> None:
    """`semel prove --requests 100000 --seed 1`, request 32353: the first token was put back into the lost answer."""
    with standing(two.rigs):
        stream = await two.submit()
        await lose(two.busy)
    if is_begun:
        await stream.begin()
    assert await tokens(stream) == expected([1])
    assert [one.engine.submissions for one in two.rigs] == [1, 1]
    await stream.close()
    assert two.queries == 1, "one query per item and request, however many workers it took (D8)"
    said = [record.getMessage() for record in caplog.records if "another worker" in record.getMessage()]
    assert said == ["the request goes to another worker: the worker was lost while it answered"]


async def test_an_answer_that_has_begun_ends_with_the_truth(two: Workers) -> None:
    for one in two.rigs:
        one.engine.pause_s = 0.5  # or all of it might be there when the first output is read
    stream = await two.submit()
    busy = two.busy
    with pytest.raises(WorkerLost, match="send the request again"):
        async for _ in stream:
            await lose(busy)


async def test_without_any_worker_one_sentence_is_told_and_the_log_says_why_S7(
    two: Workers, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong implementation told whoever asked where the workers are, and in what words their links had broken."""
    monkeypatch.setattr(FrontendLink, "_connect", lambda _: None)  # or they would be back before anybody looks
    for one in two.rigs:
        await lose(one)
    await until(lambda: not two.fleet.serving)
    with pytest.raises(NotReady) as caught:
        two.fleet.choose([])
    assert str(caught.value) == "no worker is connected; try again in a moment"
    for worker in two.fleet.workers:
        assert f"the worker at {worker.name} is not connected: lost" in caplog.text


async def test_a_whole_answer_that_has_begun_is_begun_anew_by_another_worker(two: Workers) -> None:
    """Issue 8.4: nothing has reached the client. Control: the same loss ends a stream, in the test above."""
    for one in two.rigs:
        one.engine.pause_s = 0.05
    stream = await two.submit(kind=BufferedAnswer)
    answering = asyncio.create_task(tokens(stream))
    lost = two.busy
    (heard,) = lost.frontends[0].worker._streams.values()
    await until(lambda: heard._make is None)  # the first output has come
    await lose(lost)
    assert await answering == expected([1]), "nothing of the first attempt is in it"
    await stream.close()
    assert two.queries == 1, "one query per item and request (D8)"


async def test_a_request_is_submitted_twice_at_most_also_if_it_was_lost_before_it_was_taken(two: Workers) -> None:
    """Control: both losses have a remedy of their own, and together they made a third attempt."""
    for one in two.rigs:
        one.engine.pause_s = 1.0  # longer than the lost one takes to come back
    submitting = asyncio.create_task(two.submit())
    await until(lambda: any(side.worker._streams for side in two.sides))
    (first,) = [one for one in two.rigs if one.frontends[0].worker._streams]
    (second,) = [one for one in two.rigs if one is not first]
    await lose(first)
    stream = await submitting
    await until(lambda: len(two.fleet.serving) == 2)
    await lose(second)
    with pytest.raises(WorkerLost, match="send the request again"):
        await tokens(stream)
    await stream.close()
    assert (first.engine.submissions <= 1, second.engine.submissions) == (True, 1)
    assert two.queries == 1, "one query per item and request (D8)"


async def test_a_worker_that_stopped_serving_after_it_was_chosen_gets_nothing(two: Workers) -> None:
    """Control: it is connected, and would take the request."""

    async def make(_: Digest) -> Feature:
        return feature(1)

    chosen, submission = two.fleet.choose([digest_of(1)]), Submission("r", prompt([1]), {})
    two.fleet.retire(chosen)
    assert chosen.is_connected
    stream = await two.fleet.submit(chosen, submission, make)
    assert await tokens(stream) == expected([1])
    await stream.close()
    assert two.busy.frontends[0].worker is not chosen
    two.fleet.retire(two.busy.frontends[0].worker)
    with pytest.raises(NotReady, match="leaves the fleet"):
        await two.fleet.submit(chosen, submission, make)


async def test_if_nobody_is_left_to_go_on_with_the_items_are_counted_all_the_same_D8(two: Workers) -> None:
    """Control: what was promised when the request was submitted, that another would count them."""
    with standing(two.rigs):
        stream = await two.submit()
        (other,) = [one for one in two.rigs if one is not two.busy]
        two.fleet.retire(other.frontends[0].worker)
        await lose(two.busy)
    with pytest.raises(WorkerLost):
        await tokens(stream)
    await stream.close()
    assert two.queries == 1


async def test_what_a_client_sent_counts_at_the_first_worker_that_took_it_and_nowhere_else_D8(two: Workers) -> None:
    """Controls: what a frontend rendered counts at none; what the first one did not take counts at the second."""
    with standing(two.rigs):
        stream = await two.submit(of_client=True)
        assert two.client_queries == [0, 1]
        await lose(two.busy)
    assert await tokens(stream) == expected([1])
    assert [one.engine.submissions for one in two.rigs] == [1, 1]
    assert two.client_queries == [0, 1]
    assert await tokens(await two.submit(number=2)) == expected([2])
    assert two.client_queries == [0, 1]
    await until(lambda: len(two.fleet.serving) == 2)
    chosen = two.fleet.choose([digest_of(3)])
    (first,) = [one for one in two.rigs if one.frontends[0].worker is chosen]
    before, first.engine.fault = first.engine.client_queries, "submission"
    assert await tokens(await two.submit(number=3, of_client=True)) == expected([3])
    assert first.engine.client_queries == before
    assert sum(two.client_queries) == 2


async def test_load_is_what_we_know_of_our_own_and_what_the_worker_tells_of_others(two: Workers) -> None:
    with standing(two.rigs):
        streams = [await two.submit() for _ in range(3)]
        loads = [side.worker.load for side in two.sides]
        assert sum(loads) == 3, "at once, without a word of the worker's"
        await until(lambda: any(side.worker.holding(digest_of(1)) for side in two.sides))
        assert [side.worker.load for side in two.sides] == loads, "what it tells with its items are ours"
    for stream in streams:
        await tokens(stream)
    # Answered, although not closed. What the worker told in the moment before may come later.
    await until(lambda: sum(side.worker.load for side in two.sides) == 0)
    for stream in streams:
        await stream.close()


@dataclass
class Linking:
    """Links to workers of any contract, which never get a request."""

    folder: Path
    stack: AsyncExitStack
    listeners: dict[RemoteWorker, WorkerListener]

    async def link(self, contract: Contract) -> RemoteWorker:
        """A worker that has not connected yet."""
        name = f"{len(self.listeners)}"
        (self.folder / name).mkdir(mode=0o700)
        listener = WorkerListener(f"ipc://{self.folder}/{name}/w.sock", key=KEY, contract=contract)
        await self.stack.enter_async_context(listener)
        backoff = Backoff(first_s=0.01, max_s=0.05)
        link = FrontendLink(listener.address, key=KEY, frontend_id="f", backoff=backoff)
        worker = RemoteWorker(await self.stack.enter_async_context(link))
        running = asyncio.create_task(worker.run())
        self.stack.callback(running.cancel)
        self.listeners[worker] = listener
        return worker

    async def fleet(self, *contracts: Contract) -> Fleet:
        """A fleet in which workers come one after another."""
        fleet = Fleet()
        for contract in contracts:
            fleet.add(worker := await self.link(contract))
            await until(lambda worker=worker: worker.is_connected)  # type: ignore[misc]
        return fleet

    async def lose(self, worker: RemoteWorker) -> None:
        """End its session; it comes again by itself."""
        for peer in self.listeners[worker].peers:
            self.listeners[worker].close(peer, "lost")
        await until(lambda: not worker.is_connected)


REFUSED = "the workers do not fit this frontend; its log says why"


@pytest.fixture
async def linking(tmp_path: Path) -> AsyncIterator[Linking]:
    async with AsyncExitStack() as stack:
        yield Linking(tmp_path, stack, {})


@pytest.mark.parametrize(
    ("contract", "reason"),
    [
        (replace(CONTRACT, max_embeds=CONTRACT.max_embeds - 1), "--max-num-batched-tokens"),
        (replace(CONTRACT, fingerprint="f" * 8), "--processor"),
    ],
)
async def test_a_worker_that_would_answer_otherwise_is_refused_with_the_flag_to_change(
    linking: Linking, contract: Contract, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Control: the processor's fingerprint alone tells only one of them apart."""
    fleet = await linking.fleet(CONTRACT, contract)
    first, second = fleet.workers
    assert fleet.serving == [first]
    (told,) = [record.getMessage() for record in caplog.records if "is not used" in record.getMessage()]
    assert second.name in told
    assert reason in told
    assert (contract.fingerprint == CONTRACT.fingerprint) == (reason != "--processor")


async def test_workers_whose_caches_differ_in_size_serve_together(linking: Linking) -> None:
    fleet = await linking.fleet(CONTRACT, replace(CONTRACT, cache_bytes=CONTRACT.cache_bytes + 1))
    assert len(fleet.serving) == 2


async def test_nobody_serves_for_a_moment_who_is_not_admitted(linking: Linking) -> None:
    """Control: `is_connected`, which was all that counted until somebody looked at the contract."""
    fleet = await linking.fleet(CONTRACT)
    stranger = await linking.link(replace(CONTRACT, model="another"))
    seen: list[tuple[bool, bool]] = []
    fleet.add(stranger)
    judge = stranger.on_change
    assert judge is not None

    def judged() -> None:
        judge()
        seen.append((stranger.is_connected, stranger in fleet.serving))

    stranger.on_change = judged
    await until(lambda: stranger.is_connected)
    assert seen == [(True, False)], "decided in the very step in which it connected"


async def test_a_processor_that_is_not_ours_keeps_a_worker_out_also_after_it_reconnects(
    linking: Linking, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = await linking.fleet(CONTRACT)
    (worker,) = fleet.workers
    fleet.admit(lambda _: Difference("fingerprint", "it is not ours"))
    assert (fleet.serving, fleet.contract, fleet.reason) == ([], None, REFUSED)
    await linking.lose(worker)
    await until(lambda: worker.is_connected)
    assert fleet.serving == []
    with pytest.raises(NotReady, match=REFUSED):
        fleet.choose([])
    assert f"{worker.name} is not used: it is not ours" in caplog.text


async def test_when_nobody_serves_any_more_another_contract_may_come_but_no_other_model(linking: Linking) -> None:
    longer, other = replace(CONTRACT, max_tokens=CONTRACT.max_tokens + 1), replace(CONTRACT, model="another")
    fleet = await linking.fleet(CONTRACT, other, longer)
    fleet.admit(lambda _: None)
    first, stranger, successor = fleet.workers
    assert fleet.serving == [first]
    fleet.retire(first)
    assert (fleet.serving, fleet.contract) == ([successor], longer)
    fleet.restore(first)
    assert fleet.serving == [successor], "who serves stays"
    fleet.remove(successor)
    assert fleet.serving == [first]
    fleet.remove(first)
    assert (fleet.serving, fleet.workers) == ([], (stranger,))
    assert fleet.reason == REFUSED


async def test_a_worker_s_new_process_is_not_ejected_for_what_the_old_one_did(linking: Linking) -> None:
    """Control: a new session with the same process changes nothing."""
    health = FleetHealth()
    fleet = Fleet([worker := await linking.link(CONTRACT)], health=health)
    await until(lambda: worker.is_connected)
    for _ in range(3):
        health.fail(health.begin(worker.name))
    assert fleet.is_ejected(worker)
    for incarnation, is_ejected in ((linking.listeners[worker].incarnation, True), (b"another1", False)):
        linking.listeners[worker].incarnation = incarnation
        await linking.lose(worker)
        await until(lambda: worker.is_connected)
        assert fleet.is_ejected(worker) == is_ejected


async def test_a_worker_that_has_not_come_yet_is_waited_for_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Control: once it was there, or if it refuses this frontend, it is a warning."""
    caplog.set_level(logging.INFO)
    address, deadlines = f"ipc://{tmp_path}/w.sock", Deadlines(handshake_s=0.05)
    link = FrontendLink(
        address, key=KEY, frontend_id="f", deadlines=deadlines, backoff=Backoff(first_s=0.01, max_s=0.05)
    )
    async with link:
        worker = RemoteWorker(link)
        running = asyncio.create_task(worker.run())
        await until(lambda: f"waiting for the worker at {address}: no handshake within" in caplog.text)
        worker._lose(Reset("key", "the keys differ"))
        assert [record.levelname for record in caplog.records if "worker at" in record.getMessage()] == [
            "INFO",
            "WARNING",
        ]
        async with WorkerListener(address, key=KEY, contract=CONTRACT):
            await until(lambda: worker.is_connected)
        await until(lambda: not worker.is_connected)
        assert caplog.records[-1].levelname == "WARNING"
        running.cancel()


async def test_the_wait_for_an_engine_does_not_run_out_while_one_is_paused_S22(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was under way in an engine that was killed is tried alone, and the others wait for that. If the next engine
    is paused, they were refused after 30 s."""
    monkeypatch.setattr("semel.fleet.fleet.IDLE_WORKER_TIMEOUT_S", 0.05)
    worker = UnlinkedWorker(0)
    fleet = Fleet([worker])
    worker.is_paused = True
    worker.on_change()
    waiting = asyncio.create_task(fleet._wait_while(lambda: True))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    worker.is_paused = False
    worker.on_change()
    assert not await waiting, "it is over after its time"
    assert await fleet._wait_while(lambda: False)
