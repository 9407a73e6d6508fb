"""Turns at an engine, against a simulated engine and a model that looks at everything (threats S21)."""

from __future__ import annotations

import math
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from semel.fairness.queue import FairQueue
from semel.fairness.turns import EngineWindow, Turn, Turns
from tests.effort import examples
from tests.fairness.model import Model, Piece
from tests.operations import operations

MOST = 32 + 16
"""Sequences that an engine of 32 gets, if they are so short that many have ended before it is known."""

TENANTS = ("acme", "globex", "initech", "umbrella")
WINDOW = EngineWindow(sequences=32, step_tokens=2_048)


class Fifo(Turns):
    """The wrong implementation: the engine gets everything in order of arrival, as its own queue would."""

    def begin(self) -> Turn | None:
        waiting = [tenant for tenant in self.waiting._tenants.values() if tenant.items]
        tenant = min(waiting, key=lambda tenant: tenant._order[0][1], default=None)
        if tenant is None or self.places + tenant.next_item.places > WINDOW.sequences:
            return None
        return self._enter(self.waiting.take(tenant))


class Rounds(Turns):
    """Another wrong one: tenants take turns by requests, whatever these cost."""

    def generate(self, turn: Turn, tokens: int) -> bool:  # noqa: ARG002
        return super().generate(turn, 0)

    def _enter(self, turn: Turn) -> Turn:
        before = turn._tenant.used
        super()._enter(turn)
        turn._tenant.used = before + 1
        return turn


class Sorting(Turns):
    """One that looks at every tenant for each decision."""

    def begin(self) -> Turn | None:
        waiting = (tenant for tenant in self.waiting._tenants.values() if tenant.items)
        order = sorted(waiting, key=lambda one: (one.used, one._rank))
        return self._enter(self.waiting.take(order[0])) if order and self._fits(order[0].next_item, 1) else None


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Job:
    """A request as the engine finds it."""

    tenant: str
    prompt_tokens: int
    tokens: int
    sequences: int = 1


@dataclass(eq=False)
class Running:
    job: Job
    turn: Turn
    prompt_left: int
    made: int = 0


@dataclass
class Simulation:
    """An engine that computes prompts up to the tokens of a step and one token of each running sequence a step."""

    turns: Turns
    clock: Clock = field(default_factory=Clock)
    window: EngineWindow = WINDOW
    running: list[Running] = field(default_factory=list)
    waiting: dict[Turn, Job] = field(default_factory=dict)
    queued: Counter[str] = field(default_factory=Counter)
    """Of these, by tenant."""
    reports: deque[list[Callable[[], object]]] = field(default_factory=deque)
    """What the engine has told, and has not been heard of yet."""
    delay: int = 0
    """Steps until it is heard."""

    def join(self, job: Job) -> Turn:
        turn = self.turns.join(job.tenant, job.prompt_tokens, max_tokens=job.tokens, sequences=job.sequences)
        self.waiting[turn] = job
        self.queued[job.tenant] += 1
        return turn

    def fill(self) -> Iterator[Turn]:
        while (turn := self.turns.begin()) is not None:
            job = self.waiting.pop(turn)
            self.queued[job.tenant] -= 1
            self.running.append(Running(job, turn, job.prompt_tokens))
            yield turn

    def step(self) -> Counter[str]:
        """One step, first come first served. Returns what it computed, by tenant."""
        self.clock.now += 0.02
        made: Counter[str] = Counter()
        reports: list[Callable[[], object]] = []
        budget, room = self.window.step_tokens, self.window.sequences
        for one in list(self.running):
            if one.job.sequences > room and room < self.window.sequences:
                break
            room -= one.job.sequences
            if one.prompt_left:
                part = min(one.prompt_left, budget)
                budget -= part
                one.prompt_left -= part
                made[one.job.tenant] += part
            if not one.prompt_left:
                one.made += 1
                made[one.job.tenant] += one.job.sequences
                reports.append(partial(self.turns.generate, one.turn, one.job.sequences))
                if one.made >= one.job.tokens:
                    self.running.remove(one)
                    reports += [partial(self.turns.end, one.turn)] * one.job.sequences
                    reports.append(partial(self.turns.leave, one.turn))
        self.reports.append(reports)
        for report in self.reports.popleft() if len(self.reports) > self.delay else ():
            report()
        return made


def draw(kind: int, tenant: str, random_: random.Random) -> Job:
    """A request: of short texts, of long prompts, of long answers, of many answers to one prompt, or of any."""
    match kind:
        case 0:
            return Job(tenant, random_.randint(5, 30), random_.randint(1, 8))
        case 1:
            return Job(tenant, random_.randint(500, 2_000), random_.randint(1, 20))
        case 2:
            return Job(tenant, random_.randint(5, 30), random_.randint(20, 60))
        case 4:
            return Job(tenant, random_.randint(5, 30), random_.randint(8, 32), random_.randint(2, 8))
        case _:
            return Job(tenant, random_.randint(5, 500), random_.randint(1, 60), random_.choice((1, 1, 1, 1, 4)))


def run(
    make: Callable[[EngineWindow, Clock], Turns],
    kinds: tuple[int, ...],
    requests: int,
    seed: int = 1,
    is_silent: Callable[[int, int], bool] = lambda _step, _tenant: False,
) -> list[Counter[str]]:
    """The tokens of each step, while every tenant has a request waiting; the first sends many more than the others."""
    random_, clock = random.Random(seed), Clock()
    simulation = Simulation(make(WINDOW, clock), clock, WINDOW)
    steps: list[Counter[str]] = []
    sent = 0
    while sent < requests:
        for number, (tenant, kind) in enumerate(zip(TENANTS, kinds, strict=True)):
            if is_silent(len(steps), number):
                continue
            for _ in range((200 if number == 0 else 48) - simulation.queued[tenant]):
                simulation.join(draw(kind, tenant, random_))
                sent += 1
        for _ in simulation.fill():
            pass
        steps.append(simulation.step())
        assert simulation.turns.places <= MOST
    return steps


def least_share(steps: list[Counter[str]], period: int) -> float:
    """The least part of an equal share of tokens that a tenant got in any period."""
    sums = {tenant: [0] for tenant in TENANTS}
    for step in steps:
        for tenant in TENANTS:
            sums[tenant].append(sums[tenant][-1] + step[tenant])
    shares = []
    for begin in range(len(steps) - period):
        got = [sums[tenant][begin + period] - sums[tenant][begin] for tenant in TENANTS]
        shares.append(min(got) * len(TENANTS) / sum(got))
    return min(shares)


KINDS = [(0, 0, 0, 0), (2, 0, 0, 1), (1, 0, 2, 3), (3, 3, 3, 3), (0, 1, 2, 3), (1, 1, 1, 0), (0, 1, 2, 4), (2, 2, 2, 4)]
PERIOD = 500
"""Steps: 10 s of an engine with steps of 20 ms."""

OFTEN = KINDS[1], KINDS[6]
"""The mixes that the wrong implementations fail, and one with many answers to a prompt."""


@pytest.mark.parametrize("kinds", [pytest.param(one, marks=() if one in OFTEN else pytest.mark.slow) for one in KINDS])
def test_whoever_has_a_request_waiting_gets_its_share_of_tokens_in_any_ten_seconds_S21(kinds: tuple[int, ...]) -> None:
    steps = run(Turns, kinds, 10_000)
    assert len(steps) > PERIOD
    assert least_share(steps, PERIOD) >= 0.8


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [Fifo, Rounds])
def test_mutants_in_order_of_arrival_or_by_requests_the_dear_take_it_all(mutant: type[Turns]) -> None:
    assert least_share(run(mutant, (2, 0, 0, 1), 10_000), PERIOD) < 0.2


def shares_with_silences(turns: Callable[[EngineWindow, Clock], Turns]) -> float:
    """The least share, where one tenant has long prompts, one many answers to each, and one is silent now and then."""
    return least_share(
        run(turns, (1, 0, 1, 4), 10_000, is_silent=lambda step, tenant: tenant == 1 and step % 700 > 600), 500
    )


def test_who_needs_many_places_at_a_time_is_passed_over_by_a_few_tokens_only_S21() -> None:
    assert shares_with_silences(Turns) >= 0.8


@pytest.mark.slow
def test_a_mutant_that_lets_it_be_passed_over_by_any_who_fit_starves_it_and_then_those_who_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(EngineWindow, "lead_tokens", 1_000_000)
    assert shares_with_silences(Turns) < 0.3


def steps_alone(turns: Turns, kind: int, delay: int) -> int:
    """The steps that an engine needs for all requests of a tenant that is alone."""
    random_ = random.Random(1)
    simulation = Simulation(turns, delay=delay)
    for _ in range(1_000):
        simulation.join(draw(kind, "acme", random_))
    steps = 0
    while simulation.waiting or simulation.running:
        for _ in simulation.fill():
            pass
        simulation.step()
        steps += 1
    return steps


@pytest.mark.parametrize(("kind", "delay"), [(0, 2), (1, 0), (2, 1), (3, 2)])
def test_the_engine_of_a_tenant_that_is_alone_does_not_idle(kind: int, delay: int) -> None:
    assert steps_alone(Turns(WINDOW, Clock()), kind, delay) <= 1.1 * steps_alone(Turns(None), kind, delay)


def test_a_mutant_whose_window_is_what_the_engine_runs_lets_it_idle_between_short_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(EngineWindow, "ends", lambda *_: 0)
    assert steps_alone(Turns(WINDOW, Clock()), 0, 2) > 1.3 * steps_alone(Turns(None), 0, 2)


@dataclass(eq=False)
class Request(Piece):
    """A request, as the model sees it."""

    job: Job = field(kw_only=True)
    turn: Turn = field(kw_only=True)
    left: int = field(kw_only=True)
    """Sequences that have not ended."""

    is_ahead: bool = False
    is_over: bool = False


@dataclass
class WindowModel:
    """The rules of the window, each as a sum over everything that ever happened, over the model of a queue."""

    window: EngineWindow
    queue: Model = field(default_factory=lambda: Model(sys.maxsize))
    requests: list[Request] = field(default_factory=list)

    def inside(self, tenant: str | None = None) -> list[Request]:
        """Those that the engine has."""
        return [one for one in self.requests if not (one.is_waiting or one.is_over) and tenant in (None, one.tenant)]

    def width(self, one: Request) -> int:
        return min(one.job.sequences, self.window.sequences - self.window.sequences // 8)

    def places(self, tenant: str | None = None) -> int:
        return sum(min(self.width(one), one.left) for one in self.inside(tenant))

    def join(self, job: Job, turn: Turn) -> None:
        self.requests.append(Request(job.tenant, job=job, turn=turn, left=job.sequences, group=turn))
        self.queue.wait(self.requests[-1])

    def fits(self, one: Request, width: int) -> bool:
        ahead = [it for it in self.inside() if it.is_ahead]
        own = [it for it in ahead if it.tenant == one.tenant]
        if len(own) >= 2 and sum(it.job.prompt_tokens for it in ahead) >= 4 * self.window.step_tokens:
            return False
        active = {it.tenant for it in self.requests if it.left and not it.is_over}
        short = min(2 * self.window.sequences // one.job.tokens, self.window.sequences // 2)
        limit = self.window.sequences + max(short, self.window.sequences // 16)
        share = math.ceil(Fraction(self.window.sequences, max(2, len(active))))
        if len(self.queue.counted) > 1 and self.places(one.tenant) + width > share:
            limit = self.window.sequences - self.window.sequences // 8 + short
        return self.places() + width <= limit

    def next(self) -> Request | None:
        """Which request begins now."""
        order = self.queue.order()
        for name in order:
            one = self.queue.next_of(name)
            assert isinstance(one, Request)
            if self.queue.counted[name].used - self.queue.counted[order[0]].used > 8 * self.window.sequences:
                return None
            if self.fits(one, self.width(one)):
                return one
            if not self.fits(one, 1):
                return None
        return None

    def begin(self, one: Request) -> None:
        self.queue.take(one)
        self.queue.counted[one.tenant].used += one.job.prompt_tokens
        one.is_ahead = True


jobs = st.builds(
    Job,
    st.sampled_from(TENANTS[:3]),
    st.sampled_from((1, 10, 900, 5_000)),
    tokens=st.sampled_from((1, 3, 16, 100)),
    sequences=st.sampled_from((1, 1, 1, 2, 8, 40)),
)
moves = st.one_of(
    jobs,
    st.tuples(st.sampled_from(("generate", "generate", "end", "end", "leave")), st.integers(0, 1 << 16)),
)


def play(turns: Turns, steps: list[Job | tuple[str, int]]) -> WindowModel:
    """Requests come, generate, end and are given up at random. Checks every decision against the model."""
    assert turns.window is not None
    model = WindowModel(turns.window)
    for step in steps:
        if isinstance(step, Job):
            turn = turns.join(step.tenant, step.prompt_tokens, max_tokens=step.tokens, sequences=step.sequences)
            model.join(step, turn)
        else:
            _move(turns, model, *step)
        while (one := model.next()) is not None:
            model.begin(one)
            assert turns.begin() is one.turn, "another request begins than the rules say"
        assert turns.begin() is None, "a request begins that may not"
        assert turns.places == model.places() <= MOST, "the window is exceeded"
        assert len(turns.waiting) == len(model.queue.pieces)
        assert turns.sequences.total == sum(one.left for one in model.requests)
        unseen = [one.job.prompt_tokens for one in model.requests if one.is_waiting or one.is_ahead]
        assert turns.prompt_tokens == sum(unseen)
    return model


def _move(turns: Turns, model: WindowModel, move: str, which: int) -> None:
    alive = [one for one in model.requests if not one.is_over] if move == "leave" else model.inside()
    if not alive:
        return
    one = alive[which % len(alive)]
    match move:
        case "generate":
            assert turns.generate(one.turn, 7) == one.is_ahead
            model.queue.counted[one.tenant].used += 7
            one.is_ahead = False
        case "end":
            turns.end(one.turn)
            one.left = max(0, one.left - 1)
        case _:
            turns.leave(one.turn)
            turns.leave(one.turn)
            if one.is_waiting:
                model.queue.leave(one)
            one.is_over, one.is_ahead, one.left = True, False, 0


COMES_BACK: list[Job | tuple[str, int]] = [
    Job("acme", 1, tokens=1),
    Job("globex", 1, tokens=1, sequences=40),
    Job("acme", 1, tokens=1, sequences=40),
    Job("globex", 1, tokens=100),
    ("leave", 2),
    Job("acme", 1, tokens=1),
]
"""The tenant that gave up its request and sent another is before the one with an equal counter."""


@settings(max_examples=examples(300), deadline=None)
@example(COMES_BACK)
@given(st.lists(moves, max_size=80))
def test_every_decision_is_the_model_s_whatever_happens_S21(steps: list[Job | tuple[str, int]]) -> None:
    model = play(Turns(WINDOW, Clock()), steps)
    turns = Turns(WINDOW, Clock())
    jobs = [one.job for one in model.requests]
    for turn in [turns.join(job.tenant, job.prompt_tokens, sequences=job.sequences) for job in jobs]:
        while turns.begin() is not None:
            pass
        turns.leave(turn)
    assert (turns.places, len(turns.waiting), turns.sequences.total, turns.prompt_tokens) == (0, 0, 0, 0)


def test_a_mutant_that_keeps_the_entry_of_a_tenant_that_comes_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    list_again = FairQueue._list
    monkeypatch.setattr(FairQueue, "_list", lambda self, tenant: None if tenant._entry else list_again(self, tenant))
    with pytest.raises(AssertionError, match="another request begins"):
        play(Turns(WINDOW, Clock()), COMES_BACK)


@pytest.mark.parametrize("is_mutant", [False, True])
def test_a_tenant_that_comes_back_again_and_again_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, is_mutant: bool
) -> None:
    """It has had more than the tenant that waits before it. The mutant never drops a void entry."""
    if is_mutant:
        monkeypatch.setattr(FairQueue, "_drop_void_entries", lambda _: None)
    turns = Turns(WINDOW, Clock())
    busy = [turns.join("initech", 1), *(turns.join("acme", 1) for _ in range(100))]
    begun(turns)
    turns.generate(busy[0], 100_000)
    for _ in range(10_000):
        turns.leave(turns.join("initech", 1))
    assert (len(turns.waiting._heap) > 100) is is_mutant


def test_a_mutant_that_frees_no_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Job | tuple[str, int]] = [Job("acme", 1, 1), ("end", 0), ("leave", 0)]
    play(Turns(WINDOW, Clock()), steps)
    monkeypatch.setattr(Turns, "_shrink", lambda *_: None)
    with pytest.raises(AssertionError, match="window is exceeded"):
        play(Turns(WINDOW, Clock()), steps)


def begun(turns: Turns) -> list[Turn]:
    """All that may begin now."""
    found = []
    while (turn := turns.begin()) is not None:
        found.append(turn)
    return found


def test_while_others_are_about_the_last_eighth_is_theirs_and_alone_again_it_is_not() -> None:
    clock = Clock()
    turns = Turns(WINDOW, clock)
    turns.leave(turns.join("globex", 10))
    acme = [turns.join("acme", 10) for _ in range(100)]
    assert begun(turns) == acme[:28]
    globex = turns.join("globex", 10)
    assert begun(turns) == [globex]
    turns.leave(globex)
    clock.now = 601.0
    acme.append(turns.join("acme", 10))
    assert begun(turns) == acme[28:34]


def test_without_names_or_without_a_window_nothing_waits_and_the_order_is_that_of_arrival() -> None:
    for turns, name in ((Turns(WINDOW, Clock()), ""), (Turns(None, Clock()), "acme")):
        for number in range(1_000):
            turn = turns.join(name, 5_000, sequences=1 + number % 40)
            assert turns.begin() is turn
        assert len(turns.waiting) == 0


@pytest.mark.parametrize("sequences", [8, 28, 32, 128, 1_000])
def test_a_request_of_many_sequences_gets_its_turn_however_many_others_come(sequences: int) -> None:
    turns = Turns(WINDOW, Clock())
    inside = deque(turns.join("globex", 10) for _ in range(200))
    begun(turns)
    wide = turns.join("acme", 10, sequences=sequences)
    passed = 0
    while wide.is_waiting:
        turns.leave(inside.popleft())
        inside.append(turns.join("globex", 10))
        passed += len(begun(turns))
        assert turns.places <= MOST
    assert passed <= min(sequences, 28) + 32
    for _ in range(sequences):
        turns.end(wide)
    turns.leave(wide)
    assert begun(turns)


@pytest.mark.parametrize("sequences", [1, 2, 3, 4, 8, 1_024])
def test_engines_of_any_size_run_requests_of_any_size(sequences: int) -> None:
    window = EngineWindow(sequences, 1)
    assert 1 <= window.common_places <= sequences < window.sequences + window.lead
    turns = Turns(window, Clock())
    for turn in [turns.join(tenant, 10_000, sequences=n) for tenant in TENANTS for n in (1, 2_000)]:
        while turn.is_waiting:
            for one in begun(turns):
                turns.leave(one)


def cost_of_decisions(turns: Turns, tenants: int) -> int:
    """The operations of twenty decisions, and of all that follows from them, while so many tenants wait."""
    for number in range(tenants):
        for _ in range(3):
            turns.join(f"tenant {number}", 10)
    inside = deque(begun(turns))

    def decide() -> None:
        for _ in range(20):
            turn = inside.popleft()
            turns.generate(turn, 5)
            turns.leave(turn)
            inside.extend(begun(turns))

    return operations(decide)


def test_a_decision_costs_as_much_for_two_thousand_tenants_as_for_a_hundred() -> None:
    assert cost_of_decisions(Turns(WINDOW, Clock()), 2_000) < 2 * cost_of_decisions(Turns(WINDOW, Clock()), 100)
    assert cost_of_decisions(Sorting(WINDOW, Clock()), 2_000) > 8 * cost_of_decisions(Sorting(WINDOW, Clock()), 100)
