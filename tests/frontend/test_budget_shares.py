"""Shares of the budget: random requests of four tenants, against a model that looks at everything (threats S21)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.errors import Busy, ConfigError, MediaTooLarge, TooManyBytes
from semel.fairness.shares import Claims
from semel.frontend.budget import Account, Budget
from semel.frontend.limits import BudgetLimits
from tests.effort import examples
from tests.fairness.model import Model, Piece
from tests.waiting import until

TENANTS = ("a", "b", "c", "d")
LIMITS = BudgetLimits(max_request_bytes=60, max_bytes=100, max_requests=6)


class Greedy(Claims[Account]):
    """The wrong implementation: first come, first served."""

    def to_revoke(self, tenant: str, amount: int) -> Sequence[Account] | None:  # noqa: ARG002
        return () if self.shares.fits(amount) else None


@dataclass(eq=False)
class Holder:
    """A request of a tenant: its place, and its bytes."""

    account: Account
    task: asyncio.Task[None] | None
    """In the scope in which it can be called back; None if it cannot, as a download."""

    place: Piece
    bytes: Piece
    brought: int = 0


@dataclass
class Requests:
    """All requests that are open, with the model of all that tenants share: once for places, once for bytes."""

    budget: Budget
    places: Model = field(default_factory=lambda: Model(LIMITS.max_requests))
    bytes: Model = field(default_factory=lambda: Model(LIMITS.max_bytes))
    holders: list[Holder] = field(default_factory=list)
    calls_back: int = 0

    async def ask(self, model: Model, tenant: str, amount: int, take: Callable[[], object]) -> bool:
        """Ask for so much more, and check what comes of it and who is called back."""
        try:
            take()
        except Busy:
            admitted = False
        else:
            admitted = True
        gone = [one for one in self.holders if one.account._error is not None]
        pieces = {piece for one in gone for piece in (one.place, one.bytes)}

        def choose(options: list[Piece]) -> Piece:
            called_back = [piece for piece in options if piece in pieces]
            assert called_back, "a tenant within its share was refused, or another was called back"
            return called_back[0]

        revoked = model.revoke(tenant, amount, choose)
        assert admitted == (revoked is not None), "a tenant within its share was refused, or another one was not"
        assert len(revoked or ()) == len(gone), "called back in vain"
        for one in gone:
            self.calls_back += 1
            self.forget(one)
            assert one.task is not None
            with pytest.raises(Busy, match="while other tenants ask, each has an equal share"):
                await one.task
        return admitted

    def forget(self, one: Holder) -> None:
        self.holders.remove(one)
        for model, piece in ((self.places, one.place), (self.bytes, one.bytes)):
            model.pieces = [other for other in model.pieces if other is not piece]

    def charge(self, one: Holder, nbytes: int) -> None:
        """Those with bytes stand in the order in which they began to have some."""
        if nbytes and not one.bytes.amount:
            self.bytes.pieces.append(one.bytes)
        elif one.bytes.amount and not nbytes:
            self.bytes.pieces.remove(one.bytes)
        one.bytes.amount = nbytes

    def check(self) -> None:
        nbytes, places = self.bytes.amounts(), self.places.amounts()
        assert self.budget.by_tenant() == {tenant: (nbytes[tenant], places[tenant]) for tenant in places}
        assert all(one.account.charged == one.bytes.amount <= LIMITS.max_request_bytes for one in self.holders)
        assert self.budget.in_flight == nbytes.total() <= LIMITS.max_bytes
        assert self.budget.requests == len(self.holders) <= LIMITS.max_requests
        assert sum(self.budget.called_back.values()) == self.calls_back


async def wait_inside(account: Account) -> None:
    with account.revocable():
        await asyncio.Event().wait()


Step = tuple[str, str, int, int]
steps = st.lists(
    st.tuples(
        st.sampled_from(("open", "open", "download", "take", "take", "take", "keep", "close")),
        st.sampled_from(TENANTS),
        st.integers(0, 60),
        st.integers(0, 5),
    ),
    max_size=60,
)


async def play(moves: Sequence[Step]) -> int:
    """Let requests come, take, let go and end. Returns how many were called back."""
    budget = Budget(LIMITS)
    requests = Requests(budget)
    for kind, tenant, nbytes, index in moves:
        if kind in {"open", "download"}:
            await come(requests, tenant, is_download=kind == "download")
        elif requests.holders:
            one = requests.holders[index % len(requests.holders)]
            if kind == "keep":
                one.account.keep(nbytes)
                requests.charge(one, min(one.bytes.amount, nbytes))
            elif kind == "close":
                requests.forget(one)
                end(one)
            else:
                await take(requests, one, nbytes)
        requests.check()
    for one in requests.holders:
        end(one)
    await asyncio.sleep(0)
    assert (budget.in_flight, budget.requests, budget.by_tenant()) == (0, 0, {})
    return requests.calls_back


async def come(requests: Requests, tenant: str, *, is_download: bool) -> None:
    opened: list[Account] = []
    if await requests.ask(requests.places, tenant, 1, lambda: opened.append(requests.budget.open(tenant))):
        task = None if is_download else asyncio.create_task(wait_inside(opened[0]))
        if task is not None:
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # called back: nobody asks
        await asyncio.sleep(0)
        place, nbytes = Piece(tenant, can_go=not is_download), Piece(tenant, 0, can_go=not is_download)
        requests.holders.append(Holder(opened[0], task, place, nbytes))
        requests.places.pieces.append(place)


async def take(requests: Requests, one: Holder, nbytes: int) -> None:
    if one.brought + nbytes > LIMITS.max_request_bytes:
        with pytest.raises(MediaTooLarge, match="--max-request-media-bytes"):
            one.account.take(nbytes)
    elif await requests.ask(requests.bytes, one.bytes.tenant, nbytes, lambda: one.account.take(nbytes)):
        one.brought += nbytes
        requests.charge(one, one.bytes.amount + nbytes)


def end(one: Holder) -> None:
    one.account.close()
    if one.task is not None:
        one.task.cancel()


@given(steps)
@settings(max_examples=examples(300), deadline=None)
def test_whatever_tenants_do_totals_are_exact_and_nobody_within_its_share_is_refused_S21(moves: list[Step]) -> None:
    asyncio.run(play(moves))


FILLED: list[Step] = [("open", "a", 0, 0), ("take", "a", 60, 0), ("open", "a", 0, 0), ("take", "a", 40, 1)]
ONE_MORE: list[Step] = [*FILLED, ("open", "b", 0, 0), ("take", "b", 10, 2)]


async def test_the_newest_account_of_a_tenant_with_more_than_its_share_is_called_back_S21() -> None:
    assert await play(ONE_MORE) == 1
    assert await play([("open", "a", 0, 0)] * 6 + [("open", "b", 0, 0)] * 3) == 3


async def test_what_cannot_be_called_back_stays_and_the_other_is_refused() -> None:
    fixed: list[Step] = [("download" if kind == "open" else kind, *rest) for kind, *rest in FILLED]  # type: ignore[misc]
    assert await play([*fixed, ("open", "b", 0, 0), ("take", "b", 10, 2)]) == 0


async def test_first_come_first_served_is_noticed_as_a_mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.frontend.budget.Claims", Greedy)
    with pytest.raises(AssertionError, match="within its share was refused"):
        await play(ONE_MORE)


async def called_back(how: Callable[[Account], object]) -> tuple[asyncio.Task[None], Budget]:
    """A request that waits and is called back, by what another tenant's account does."""
    budget = Budget(LIMITS)
    account = budget.open("a")
    account.take(60)
    budget.open("a").take(40)
    waiting = asyncio.create_task(wait_inside(account))
    await asyncio.sleep(0)
    how(budget.open("b"))
    return waiting, budget


async def test_it_is_told_why_and_when_to_come_again() -> None:
    waiting, budget = await called_back(lambda other: other.take(1))
    with pytest.raises(
        TooManyBytes, match=r"each has an equal share of the 100 bytes.*--max-media-bytes-in-flight"
    ) as caught:
        await waiting
    assert caught.value.retry_after_s >= 1
    assert budget.called_back == {("too_many_bytes", "a"): 1}


async def test_another_thread_may_cause_it() -> None:
    def how(other: Account) -> None:
        thread = Thread(target=other.take, args=(1,))
        thread.start()
        thread.join()

    waiting, _ = await called_back(how)
    with pytest.raises(TooManyBytes):
        await waiting


async def test_a_cancellation_from_outside_stays_one() -> None:
    waiting, budget = await called_back(lambda other: other.take(1))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert budget.in_flight == 41


async def test_announced_bytes_call_nobody_back_and_are_admitted_if_they_could() -> None:
    waiting, budget = await called_back(lambda other: other.check(50))
    assert not waiting.done()
    assert budget.called_back == {}
    with pytest.raises(TooManyBytes):
        budget.open("b").check(51)  # more than its share
    waiting.cancel()


async def test_an_account_that_was_called_back_takes_nothing_more() -> None:
    budget = Budget(LIMITS)
    account = budget.open("a")
    account.take(60)
    budget.open("a").take(40)

    async def work() -> None:
        with account.revocable():
            try:
                await asyncio.Event().wait()
            finally:
                with pytest.raises(TooManyBytes):
                    account.take(1)  # such as a thread of the request that has not ended

    working = asyncio.create_task(work())
    await asyncio.sleep(0)
    budget.open("b").take(1)
    with pytest.raises(TooManyBytes):
        await working
    with pytest.raises(TooManyBytes):
        account.commit()
    assert account.charged == 0


async def test_an_answer_that_has_begun_is_not_called_back() -> None:
    budget = Budget(LIMITS)
    account = budget.open("a")
    account.take(60)
    budget.open("a").take(40)

    async def work() -> None:
        with account.revocable():
            account.commit()
            await asyncio.Event().wait()

    working = asyncio.create_task(work())
    await asyncio.sleep(0)
    with pytest.raises(TooManyBytes):
        budget.open("b").take(1)
    await until(lambda: not working.done())
    working.cancel()


def test_what_is_lent_stays_charged_to_the_tenant_until_it_is_given_back_whatever_becomes_of_the_account() -> None:
    budget = Budget(LIMITS)
    account = budget.open("a")
    account.take(60)
    with account.lend(40):
        account.keep(0)
        account.close()
        assert budget.by_tenant() == {"a": (40, 0)}
        with pytest.raises(TooManyBytes), budget.open("a").lend(61):
            pass
    assert budget.in_flight == 0
    with pytest.raises(MediaTooLarge, match="--max-media-bytes-in-flight"), budget.open("a").lend(101):
        pass  # it would never fit


async def test_what_is_lent_counts_for_the_share_and_is_not_called_back() -> None:
    waiting, budget = await called_back(lambda other: other.check(0))
    with budget.open("b").lend(50):
        with pytest.raises(TooManyBytes):
            await waiting
        assert budget.by_tenant()["b"][0] == 50
        with pytest.raises(TooManyBytes):
            budget.open("a").take(11)  # it has its share, 40 of 50
    assert budget.in_flight == 40


async def called_back_by(nbytes: int, *, pinned: int) -> tuple[bool, Budget]:
    """Whether another tenant gets so many bytes beside one that has all of them, and has pinned some."""
    budget = Budget(LIMITS)
    account = budget.open("a")
    account.take(60)
    budget.open("a").take(40)
    unpin = account.pin(pinned)
    waiting = asyncio.create_task(wait_inside(account))
    await asyncio.sleep(0)
    try:
        budget.open("b").take(nbytes)
    except TooManyBytes:
        waiting.cancel()
        return False, budget
    with pytest.raises(TooManyBytes):
        await waiting
    with pytest.raises(TooManyBytes):
        account.pin(1)
    assert account.charged == pinned
    account.close()
    assert budget.by_tenant() == {"a": (pinned + 40, 1), "b": (nbytes, 1)}
    unpin()
    assert budget.by_tenant() == {"a": (40, 1), "b": (nbytes, 1)}
    return True, budget


@pytest.mark.parametrize("pinned", [0, 10, 30])
async def test_what_is_pinned_stays_charged_when_its_account_is_called_back(pinned: int) -> None:
    assert (await called_back_by(min(60 - pinned, 50), pinned=pinned))[0]


@pytest.mark.parametrize(("pinned", "nbytes"), [(60, 1), (20, 41), (31, 1)])
async def test_nobody_is_called_back_for_bytes_that_are_pinned_or_for_the_little_beside(
    pinned: int, nbytes: int
) -> None:
    is_admitted, budget = await called_back_by(nbytes, pinned=pinned)
    assert not is_admitted
    assert budget.by_tenant()["a"] == (100, 2)


async def test_mutant_pins_that_are_offered_are_called_back_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    offer = Claims.offer

    def mutant(claims: Claims[Account], tenant: str, claim: Account, amount: int) -> None:
        offer(claims, tenant, claim, amount and claim.charged)

    monkeypatch.setattr(Claims, "offer", mutant)
    with pytest.raises(AssertionError, match="more than there is"):
        await called_back_by(41, pinned=20)


def test_a_closed_account_takes_nothing_and_closing_twice_gives_back_once() -> None:
    budget = Budget(LIMITS)
    other = budget.open()
    other.take(10)
    with budget.open() as account:
        account.take(50)
    account.close()
    account.take(20)
    assert (budget.in_flight, budget.requests, account.charged) == (10, 1, 0)


def test_threads_that_take_at_the_same_time_lose_no_byte() -> None:
    budget = Budget(BudgetLimits(1 << 40, 1 << 40, 64))

    def work() -> None:
        for _ in range(200):
            with budget.open() as account:
                for _ in range(10):
                    account.take(7)
                account.keep(3)

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert (budget.in_flight, budget.requests) == (0, 0)


@pytest.mark.parametrize(
    ("limits", "flag"),
    [
        ((0, 10, 1), "--max-request-media-bytes"),
        ((11, 10, 1), "--max-media-bytes-in-flight is 10, less than the 11"),
        ((10, 10, 0), "--max-waiting-requests"),
    ],
)
def test_limits_that_could_admit_nothing_are_refused_by_their_flag(limits: tuple[int, int, int], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        BudgetLimits(*limits)
