"""What tenants share, in any order of calls, next to the one slow model; a mutant of each primitive is found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from semel.fairness.limits import KeyedLimit, _Line
from semel.fairness.queue import FairQueue, WaitingTenant
from semel.fairness.shares import Claims
from semel.fairness.tenant_lru import IDLE_S, TenantLru
from tests.effort import examples
from tests.fairness.model import Model, Piece

TENANTS = "abc"
CAPACITY = 12
LIMIT = 5
SLOTS = 3


def chosen_from(found: Iterable[Piece]) -> Callable[[list[Piece]], Piece]:
    """Choose among equals what was found; anything else is an error."""
    left = iter(found)

    def choose(options: list[Piece]) -> Piece:
        piece = next(left, None)
        assert piece in options, "another has to yield"
        return piece

    return choose


class Subject:
    """A primitive and the model: what each step does to both."""

    kind: Callable[..., Any]

    def __init__(self) -> None:
        self.model = Model(CAPACITY)
        self.made = self.kind(CAPACITY)

    def agree(self) -> None:
        """Compare what there is."""
        shares, amounts = self.made.shares, self.model.amounts()
        assert {tenant: shares[tenant] for tenant in shares} == amounts
        assert shares.total == amounts.total() <= CAPACITY


class ClaimsSubject(Subject):
    """Claims that can be called back, or not for now."""

    kind: Callable[..., Any] = Claims

    def ask(self, piece: Piece) -> None:
        found: Sequence[Piece] | None = self.made.to_revoke(piece.tenant, piece.amount)
        assert self.model.revoke(piece.tenant, piece.amount, chosen_from(found or ())) == (
            found if found is None else [*found]
        ), "a tenant within its share was refused, or another one was not"
        if found is not None:
            for one in found:
                self.made.offer(one.tenant, one, 0)
                self.made.shares.change(one.tenant, -one.amount)
            self.made.shares.change(piece.tenant, piece.amount)
            self.made.offer(piece.tenant, piece, piece.amount)
            self.model.put(piece)

    def use(self, piece: Piece) -> None:
        piece.can_go = not piece.can_go
        self.made.offer(piece.tenant, piece, piece.amount if piece.can_go else 0)
        self.model.use(piece)

    def leave(self, piece: Piece) -> None:
        self.made.offer(piece.tenant, piece, 0)
        self.made.shares.change(piece.tenant, -piece.amount)
        self.model.drop(piece)


class LruSubject(Subject):
    """Entries of a cache; some are in use, and cannot be evicted."""

    def kind(self, capacity: int) -> TenantLru[Piece]:
        return TenantLru(capacity, lambda: self.model.now_s)

    def ask(self, piece: Piece) -> None:
        tenant, amount = piece.tenant, piece.amount
        assert {*self.made.protected(tenant, amount)} == {*self.model.protected(tenant, amount)}
        if not self.model.fits(amount):
            assert self.made.can_have(tenant, amount) == self.model.can_have(tenant, amount)
            if not self.model.can_have(tenant, amount):
                return
        victims = self.made.victims(tenant, amount)
        while not self.made.shares.fits(amount):
            options, victim = self.model.victims(tenant, amount), next(victims, None)
            assert victim in options if options else victim is None, "another entry has to go"
            if victim is None:
                return
            self.leave(victim)
        self.made.charge(tenant, amount)
        self.made.add(tenant, piece)
        self.model.put(piece)

    def use(self, piece: Piece) -> None:
        """Use an entry; of every third, it begins or ends to be in use."""
        if piece.amount % 3 == 0:
            piece.can_go = not piece.can_go
            (self.made.add if piece.can_go else self.made.remove)(piece.tenant, piece)
            self.made.touch(piece.tenant)
        elif piece.can_go:
            self.made.use(piece.tenant, piece)
        self.model.use(piece)

    def leave(self, piece: Piece) -> None:
        self.made.remove(piece.tenant, piece)
        self.made.release(piece.tenant, piece.amount)
        self.model.drop(piece)


class QueueSubject(Subject):
    """Items that wait for one of three slots, and run there."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[tuple[WaitingTenant[Piece], int]] = []

    def kind(self, capacity: int) -> FairQueue[Piece]:
        return FairQueue(capacity, lambda: self.model.now_s)

    @staticmethod
    def priority(piece: Piece) -> int:
        return piece.group == 0

    def ask(self, piece: Piece) -> None:
        piece = Piece(piece.tenant, 1, piece.amount % 3)
        assert self.made.is_full == (not self.model.fits(1))
        if self.made.is_full:
            options, found = self.model.yielding(piece.tenant), self.made.yielding(piece.tenant)
            assert found in options if options else found is None
            if found is None:
                return
            self.leave(found)
        self.made.add(piece.tenant, piece.group, piece, self.priority(piece))
        self.model.wait(piece)

    def use(self, piece: Piece) -> None:
        """The next one gets a slot; if there is none, one that runs ends, and its tenant pays for it."""
        if len(self.running) == SLOTS:
            tenant, cost = self.running.pop(piece.amount % SLOTS)
            for one in (tenant, self.model.counted[tenant.name]):
                one.running -= 1
                one.used += cost
            return
        most = SLOTS - (len(self.model.counted) > 1)
        order = [name for name in self.model.order() if self.model.counted[name].running < most]
        tenant = self.made.next_for(SLOTS)
        assert (tenant and tenant.name) == (order[0] if order else None), "it is another tenant's turn"
        if tenant is not None:
            following = self.model.next_of(tenant.name, self.priority)
            assert tenant.next_item is following, "it is another item's turn"
            assert self.made.take(tenant) is following
            self.model.take(following)
            self.model.counted[tenant.name].running += 1
            tenant.running += 1
            self.running.append((tenant, following.came % 4))

    def leave(self, piece: Piece) -> None:
        for _ in range(2):  # once is enough
            self.made.discard(piece.tenant, piece)
        self.model.leave(piece)

    def agree(self) -> None:
        assert self.made.about == len(self.model.counted)
        assert {*self.made} == {*self.model.pieces}
        assert len(self.made) == len(self.model.pieces) <= CAPACITY
        assert {name: self.made.places[name] for name in self.made.places} == self.model.amounts()


class LimitSubject(Subject):
    """Tasks that wait for an amount under the limit of their tenant, or have it."""

    kind: Callable[..., Any] = KeyedLimit

    def __init__(self) -> None:
        super().__init__()
        self.made = self.kind(LIMIT)
        self.loop = asyncio.new_event_loop()
        self.tasks: dict[Piece, asyncio.Task[None]] = {}

    def spin(self) -> None:
        for _ in range(3):
            self.loop.run_until_complete(asyncio.sleep(0))

    def ask(self, piece: Piece) -> None:
        piece.is_waiting = True
        self.tasks[piece] = self.loop.create_task(self.made.take(piece.tenant, piece.amount))
        self.model.pieces.append(piece)
        self.spin()

    def use(self, piece: Piece) -> None:
        """Let go of what one has, and cancel the next one of the same tenant in the moment of its turn."""
        following = next((one for one in self.model.pieces if one.tenant == piece.tenant and one.is_waiting), None)
        if not piece.is_waiting and following is not None:
            self.made.release(piece.tenant, piece.amount)
            self.model.pieces.remove(piece)
            self.leave(following)

    def leave(self, piece: Piece) -> None:
        if piece.is_waiting:
            self.tasks[piece].cancel()
        else:
            self.made.release(piece.tenant, piece.amount)
        self.model.pieces.remove(piece)
        self.spin()

    def agree(self) -> None:
        self.model.serve([piece for piece in self.model.pieces if piece.is_waiting], LIMIT)
        for piece in self.model.pieces:
            assert self.tasks[piece].done() != piece.is_waiting, "another has its turn"
        keys = {piece.tenant for piece in self.model.pieces}
        held = {key: sum(p.amount for p in self.model.pieces if p.tenant == key and not p.is_waiting) for key in keys}
        assert {key: self.made[key] for key in keys} == held
        assert len(self.made) == len(keys)


SUBJECTS = (ClaimsSubject, LruSubject, QueueSubject, LimitSubject)


class FairnessMachine(RuleBasedStateMachine):
    """Tenants that ask, use, let go and wait."""

    subject: type[Any]

    @initialize()
    def start(self) -> None:
        self.of: Any = self.subject()

    @rule(tenant=st.sampled_from(TENANTS), amount=st.integers(1, 8))
    def ask(self, tenant: str, amount: int) -> None:
        self.of.ask(Piece(tenant, amount))

    @rule(pick=st.integers(0, 20))
    def use(self, pick: int) -> None:
        if pieces := self.of.model.pieces:
            self.of.use(pieces[pick % len(pieces)])

    @rule(pick=st.integers(0, 20))
    def leave(self, pick: int) -> None:
        if pieces := self.of.model.pieces:
            self.of.leave(pieces[pick % len(pieces)])

    @rule(share=st.sampled_from([0.3, 0.7, 1.1]))
    def wait(self, share: float) -> None:
        self.of.model.now_s += share * IDLE_S

    @invariant()
    def agree(self) -> None:
        self.of.agree()

    def teardown(self) -> None:
        if isinstance(subject := getattr(self, "of", None), LimitSubject):
            for task in subject.tasks.values():
                task.cancel()
            subject.spin()
            subject.loop.close()


def run(subject: type[Subject], **more: Any) -> None:
    machine = type(subject.__name__, (FairnessMachine,), {"subject": subject})
    effort = settings(
        max_examples=examples(100), stateful_step_count=50, deadline=None, suppress_health_check=[*HealthCheck]
    )
    run_state_machine_as_test(machine, settings=settings(effort, **more))


@pytest.mark.parametrize("subject", SUBJECTS)
def test_whatever_tenants_do_each_gets_what_the_model_says_S18_S21_S29(subject: type[Subject]) -> None:
    run(subject)


class Greedy(Claims[Piece]):
    """First come, first served."""

    def to_revoke(self, tenant: str, amount: int) -> Sequence[Piece] | None:  # noqa: ARG002
        return () if self.shares.fits(amount) else None


class OneOrder(TenantLru[Piece]):
    """One order of use for all tenants."""

    def victims(self, *_: object) -> Iterator[Piece]:
        while keys := [key for line in self._lines.values() for key in line.keys]:
            yield keys[0]


class Rounds(FairQueue[Piece]):
    """Turns by items, whatever these cost."""

    def first(self) -> WaitingTenant[Piece] | None:
        for tenant in self._tenants.values():
            tenant.used = 0
        return super().first()


class OneLevel(FairQueue[Piece]):
    """A tenant's items in the order of arrival, whichever request sent them."""

    def add(self, name: str, group: Hashable, item: Piece, priority: int = 0) -> WaitingTenant[Piece]:  # noqa: ARG002
        return super().add(name, None, item)


class Unyielding(FairQueue[Piece]):
    """Whoever came first keeps its place in a full queue."""

    def yielding(self, tenant: str) -> Piece | None:  # noqa: ARG002
        return None


class Overtaking(KeyedLimit[str]):
    """What is small goes first."""

    def _serve(self, key: str, line: _Line) -> None:
        line.waiting = dict(sorted(line.waiting.items(), key=lambda one: one[1]))
        super()._serve(key, line)


class Leaky(KeyedLimit[str]):
    """What is cancelled in the moment of its turn keeps its amount."""

    async def take(self, key: str, amount: int = 1) -> None:
        line = self._lines.setdefault(key, _Line())
        line.waiting[turn := asyncio.get_running_loop().create_future()] = amount
        self._serve(key, line)
        try:
            await turn
        except asyncio.CancelledError:
            line.waiting.pop(turn, None)
            raise


MUTANTS: dict[type[Any], tuple[type[Subject], Callable[..., Any]]] = {
    Greedy: (ClaimsSubject, lambda _, capacity: Greedy(capacity)),
    OneOrder: (LruSubject, lambda self, capacity: OneOrder(capacity, lambda: self.model.now_s)),
    Rounds: (QueueSubject, lambda self, capacity: Rounds(capacity, lambda: self.model.now_s)),
    OneLevel: (QueueSubject, lambda self, capacity: OneLevel(capacity, lambda: self.model.now_s)),
    Unyielding: (QueueSubject, lambda self, capacity: Unyielding(capacity, lambda: self.model.now_s)),
    Leaky: (LimitSubject, lambda _, limit: Leaky(limit)),
    Overtaking: (LimitSubject, lambda _, limit: Overtaking(limit)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_found(mutant: type[Any]) -> None:
    subject, kind = MUTANTS[mutant]
    with pytest.raises(AssertionError):
        run(
            type(mutant.__name__, (subject,), {"kind": kind}),
            max_examples=300,
            phases=[Phase.generate],
            report_multiple_bugs=False,
            derandomize=True,
            database=None,
        )
