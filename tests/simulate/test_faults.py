"""Shipped code under drawn faults: 200 seeds hold every invariant, and planted faults are found within 50.

A failure names its seed: `run_seed(seed)` repeats it to the nanosecond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any, Final

import pytest

from semel.core import Digest
from semel.fleet.pending import PendingRequests
from semel.fleet.worker import RemoteWorker
from semel.lab.simulate.costs import MODELLED
from semel.lab.simulate.engine import EngineLimits
from semel.lab.simulate.faults import (
    Blip,
    Broken,
    Crash,
    Drain,
    Fault,
    FrontendCrash,
    Join,
    Partition,
    Slow,
    draw_faults,
)
from semel.lab.simulate.figures import Figures
from semel.lab.simulate.invariants import InvariantBroken
from semel.lab.simulate.processes import FleetSize
from semel.lab.simulate.whole import Plan, run
from semel.lab.simulate.workload import Chats, Talks, Traffic
from semel.ledger import Announcement, Holdings, Intake, Ledger
from semel.wire.messages import Abort

SECONDS: Final = 6.0
FRONTENDS, WORKERS = 4, 3
IMAGE_BYTES: Final = 569_184
"""Of the feature of an image of 308×308 pixels."""

# Caches have room for a few images: evictions are part of every run.
SIZE: Final = FleetSize(
    FRONTENDS,
    WORKERS,
    cache_bytes=6 * IMAGE_BYTES,
    engine=EngineLimits(max_num_seqs=4, max_num_batched_tokens=512, encoder_embeds=512, item_bytes=3 * IMAGE_BYTES),
)
COSTS: Final = replace(MODELLED, latency_s=0.05)
"""So long that what a frontend knows is often out of date."""

WORKLOAD: Final = Talks(
    Chats(turns=4, think_s=1.0, images=8, new_share=0.3, size=(308, 308)),
    Traffic(rate=6.0, seconds=SECONDS, tenants=2, answer_tokens=6),
)


def faults_of(seed: int) -> tuple[Fault, ...]:
    return draw_faults(Random(f"faults/{seed}"), frontends=FRONTENDS, workers=WORKERS, seconds=SECONDS)


def run_seed(seed: int) -> Figures:
    return run(Plan(WORKLOAD, SIZE, COSTS, faults=faults_of(seed), seed=seed, leaving=0.15))


def test_drawn_runs_have_every_kind_of_fault() -> None:
    kinds = {type(fault) for seed in range(20) for fault in faults_of(seed)}
    assert kinds == {Blip, Broken, Crash, Drain, FrontendCrash, Join, Partition, Slow}


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_no_fault_breaks_an_invariant(first: int) -> None:
    answered = refused = 0
    for seed in range(first, first + 50):
        figures = run_seed(seed)
        answered, refused = answered + figures.answered, refused + figures.refused
    assert answered > 20 * refused > 0  # faults cost something, and not much


def unannounced_gone(holdings: Holdings[Any], known: int, *, more: bool) -> list[Announcement]:
    """Evictions are not announced."""
    return [replace(one, gone=()) for one in SINCE(holdings, known, more=more)]


def skipping_resume(holdings: Holdings[Any], peer: Any, known: int | None = None) -> list[Announcement]:
    """Who comes back is not told what has changed meanwhile."""
    told = JOIN(holdings, peer, known)
    return told if known is None or told[0].since is None else [Announcement(known, holdings.number)]


def unsettled_abort(worker: RemoteWorker, stream: Any) -> None:
    """A request that is aborted is not settled: its notes are never freed."""
    if worker._session is not None and worker._session.is_open:
        worker._session.send(Abort(stream.request_id))


def unsettled_end(worker: RemoteWorker, stream: Any) -> None:
    """Nor is it when it has ended."""
    if worker._streams.pop(stream.request_id, None) is not None:
        worker._unanswered.discard(stream.request_id)
        worker.on_load()
        if not worker._streams:
            worker._idle.set()


def unfreed_intake(intake: Intake[Any], peer: Any, request_id: str) -> bool:
    """Features stay pinned when their request is closed: a lease that is never freed."""
    session = intake._sessions.get(peer)
    request = None if session is None else session.requests.pop(request_id, None)
    if session is None or request is None:
        return False
    for digest in request.awaited:
        intake._cease(session, request_id, digest)
    if not session.requests:
        del intake._sessions[peer]
    return True


@contextmanager
def unreleased_claim(pending: PendingRequests, digests: Any) -> Iterator[None]:
    """A worker counts as about to have items whose request was given up."""
    pending.begin(digests)
    yield
    pending.end(digests)


def unread_need(ledger: Ledger, request_id: str, digests: Any) -> tuple[Digest, ...]:
    """What a worker asks for is not sent again."""
    return ()


SINCE, JOIN = Holdings._since, Holdings.join


Planted = tuple[type, dict[str, Callable[..., Any]]]
PLANTED: Final[dict[str, Planted]] = {
    "a Gone that is not announced": (Holdings, {"_since": unannounced_gone}),
    "an abort that is not settled": (RemoteWorker, {"abort": unsettled_abort, "forget": unsettled_end}),
    "a resume that skips": (Holdings, {"join": skipping_resume}),
    "a lease that is never freed": (Intake, {"close": unfreed_intake}),
    "a claim that is never freed": (PendingRequests, {"request": unreleased_claim}),
    "a repair that is not sent": (Ledger, {"need": unread_need}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_within_50_seeds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, changes = PLANTED[name]
    for attribute, wrong in changes.items():
        monkeypatch.setattr(owner, attribute, wrong)
    with pytest.raises(InvariantBroken, match=r"seed \d+: "):
        for seed in range(50):
            run_seed(seed)
