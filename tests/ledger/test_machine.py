"""Ledgers, holdings and intakes of a small fleet under seeded random walks (D1-D3, D5).

Messages of different sessions interleave at will, sessions break, processes crash, engines evict, refuse and lose
items, operators inject and reset. Whatever happened, a request that was not given up is taken by its engine exactly
once, with the right features, and in the end every ledger equals its store. Broken rules are found by the same walks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random
from typing import Any, Final

import pytest

from semel.core import Digest, Feature
from semel.errors import ProtocolError
from semel.ledger import Announcement, Holdings, Intake, Ledger, Opened, holdings
from semel.worker.cache_updates import CacheUpdates, StateDelta
from tests.effort import examples
from tests.ledger.examples import DIGESTS
from tests.ledger.world import World

CAPACITIES: Final = (0, 4, 6, 9)


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a snapshot of a few items has several."""
    monkeypatch.setattr(holdings, "MAX_BATCH", 2)


WEIGHTS: Final[dict[Callable[..., object], float]] = {
    World.deliver: 30,
    World.submit: 10,
    World.engine_submits: 10,
    World.abort: 5,
    World.engine_misses: 5,
    World.evict: 4,
    World.announce: 3,
    World.send_slice: 2,
    World.process_again: 3,
    World.lose_feature: 2,
    World.engine_refuses: 1,
    World.finish: 1,
    World.inject: 1,
    World.send_out: 1,
    World.reset: 0.3,
    World.reset_session: 0.3,
    World.crash_frontend: 0.15,
    World.crash_worker: 0.15,
}
PAIRS: Final = (World.evict, World.inject, World.lose_feature)
"""The steps that take two numbers; `submit` takes more, the others one."""


def wander(seed: int, num_steps: int, **kinds: Callable[[], Any]) -> None:
    """A random walk through a world of a random shape, in which some things happen often and others never."""
    random = Random(seed)
    kinds = {"updates_kind": lambda: CacheUpdates(holdings=Holdings(max_log=random.choice((2, 4, 65_536)))), **kinds}
    world = World(random.randint(1, 4), random.randint(1, 3), random.choice(CAPACITIES), **kinds)
    weights = [weight * random.choice((0, 1, 1, 3)) for weight in WEIGHTS.values()]
    weights[0] += 1
    for step in random.choices(list(WEIGHTS), weights, k=num_steps):
        if step is World.submit:
            items = [random.randrange(256) for _ in range(random.choice((0, 1, 1, 1, 2, 3, 4)))]
            world.submit(random.randrange(256), random.randrange(256), items)
        else:
            step(world, *(random.randrange(256) for _ in range(2 if step in PAIRS else 1)))
        world.check()
    world.drain()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("walks", [examples(400), pytest.param(1_500, marks=pytest.mark.slow)])
def test_every_request_is_taken_once_with_the_right_features_and_all_ledgers_equal_the_stores_D3(walks: int) -> None:
    for seed in range(walks):
        wander(seed, 150)


class Careless(Ledger):
    """Lets a request withdraw what it sent, whoever else relies on it."""

    def settle(self, request_id: str) -> tuple[Digest, ...]:
        request = self._requests.get(request_id)
        return tuple({*super().settle(request_id), *(request.sent if request else ())})


class Credulous(Ledger):
    """Takes every note for a transfer that is still under way."""

    def need(self, request_id: str, digests: Iterable[Digest]) -> tuple[Digest, ...]:
        return tuple(digest for digest in super().need(request_id, digests) if digest not in self._notes)


class Hopeful(Intake[int]):
    """Takes what one request has asked for as promised to all."""

    def open(
        self,
        peer: int,
        request_id: str,
        digests: Iterable[Digest],
        payloads: Iterable[Digest],
        holds: Callable[[Digest], bool],
    ) -> Opened:
        opened = super().open(peer, request_id, digests, payloads, holds)
        self._sessions[peer].promised.update(opened.needed)
        return opened


class CountsItems(Intake[int]):
    """Counts a request that waits for two features twice."""

    def open(
        self,
        peer: int,
        request_id: str,
        digests: Iterable[Digest],
        payloads: Iterable[Digest],
        holds: Callable[[Digest], bool],
    ) -> Opened:
        opened = super().open(peer, request_id, digests, payloads, holds)
        self.waiting += max(0, len(self._sessions[peer].requests[request_id].awaited) - 1)
        return opened


class CountsReady(Intake[int]):
    """Counts a request as waiting that has got the last feature."""

    def arrive(self, peer: int, digest: Digest, feature: Feature) -> list[str]:
        ready = super().arrive(peer, digest, feature)
        self.waiting += len(ready)
        return ready


class CountsClosed(Intake[int]):
    """Counts a request that was closed while it waited."""

    def close(self, peer: int, request_id: str) -> bool:
        before = self.waiting
        closed = super().close(peer, request_id)
        self.waiting = before
        return closed


class CountsForgotten(Intake[int]):
    """Counts the requests of a session that ended while they waited."""

    def forget(self, peer: int) -> None:
        before = self.waiting
        super().forget(peer)
        self.waiting = before


class Trusting(Intake[int]):
    """Lets a request that its frontend has settled wait for what another one promised."""

    def reopen(self, peer: int, request_id: str, digests: Iterable[Digest], missing: Iterable[Digest]) -> Opened:
        lacking = set(missing)
        return self.open(peer, request_id, digests, (), lambda digest: digest not in lacking)


class Secretive(Holdings[int]):
    """Does not say what is gone."""

    def _since(self, known: int, *, more: bool) -> list[Announcement]:
        return [replace(told, gone=()) for told in super()._since(known, more=more)]


class Skipping(Holdings[int]):
    """Takes who comes back for one who knows everything."""

    def join(self, peer: int, known: int | None = None) -> list[Announcement]:
        return super().join(peer, None if known is None else self.number)


class Lying(Holdings[int]):
    """Says that nothing has changed to who comes back."""

    def join(self, peer: int, known: int | None = None) -> list[Announcement]:
        told = super().join(peer, known)
        return told if told[0].since is None else [Announcement(known, self.number)]


class Silent(CacheUpdates[int]):
    """Tells the one whom it concerns when it tells everybody."""

    def concerning(self, _: int) -> list[StateDelta[int]]:
        return []


def updates_with(holdings_kind: type[Holdings[int]]) -> Callable[[], CacheUpdates[int]]:
    return lambda: CacheUpdates(holdings=holdings_kind(max_log=4))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds",
    [
        {"ledger_kind": Careless},
        {"ledger_kind": Credulous},
        {"intake_kind": Hopeful},
        *({"intake_kind": kind} for kind in (CountsItems, CountsReady, CountsClosed, CountsForgotten)),
        {"updates_kind": Silent},
        *({"updates_kind": updates_with(kind)} for kind in (Secretive, Skipping, Lying)),
    ],
    ids=[
        *("careless", "credulous", "hopeful"),
        *("counts items", "counts ready", "counts closed", "counts forgotten"),
        *("silent", "secretive", "skipping", "lying"),
    ],
)
def test_the_world_notices_a_broken_rule(kinds: dict[str, Callable[[], Any]]) -> None:
    with pytest.raises((AssertionError, ProtocolError)):
        for seed in range(400):
            wander(seed, 150, **kinds)


# What is too rare for chance.


def with_a_request_that_the_engine_took_by_reference(intake_kind: type[Intake[int]]) -> World:
    """The engine has since evicted the item, the frontend knows, and sends it again with r2, which is not there yet."""
    world = World(1, 1, 9, intake_kind=intake_kind)
    for _ in range(2):
        world.submit(0, 0, [0])
        while world.deliver(0) or world.engine_submits(0):
            pass
    world.evict(0, 0)
    world.announce(0)
    world.deliver(0)
    world.submit(0, 0, [0])
    world._to_worker(0, 0)
    assert [transfer.digest for transfer in world.sessions[0, 0].bulk] == [DIGESTS[0]]
    return world


def abort_what_brings_the_item(intake_kind: type[Intake[int]]) -> None:
    world = with_a_request_that_the_engine_took_by_reference(intake_kind)
    world.engine_misses(0)
    world.abort(2)
    assert not world.sessions[0, 0].bulk
    world.drain()
    assert world.taken == {"r0": 1, "r1": 1}


def test_a_request_that_the_engine_took_and_missed_relies_on_no_transfer_of_another_D3() -> None:
    abort_what_brings_the_item(Intake)
    with pytest.raises(AssertionError, match="wait for ever"):
        abort_what_brings_the_item(Trusting)


def test_a_promise_does_not_outlive_the_last_request_that_may_rely_on_it_D3() -> None:
    world = with_a_request_that_the_engine_took_by_reference(Intake)
    world.engine_misses(0)
    world.abort(2)
    world._to_worker(0, 0)  # r1 waits for the item, which it asked for; what r2 promised was withdrawn
    world.lose_feature(0, 0)
    world._to_frontend(0, 0)  # the frontend processes the item for r1
    world.inject(0, 0)
    world.announce(0)
    world._to_frontend(0, 0)
    world.submit(0, 0, [0])  # r3 refers to what was just announced
    world.abort(1)
    world.evict(0, 0)
    world._to_worker(0, 0)
    world.drain()
    assert world.taken["r3"] == 1
