"""Turns at an engine, against a simulated engine and a model that looks at everything (threats S21)."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from semel.fairness.turns import EngineWindow, Turn, Turns
from tests.effort import examples
from tests.operations import operations

MOST = 32 + 16
"""Sequences that an engine of 32 gets, if they are so short that many have ended before it is known."""

TENANTS = ("acme", "globex", "initech", "umbrella")
WINDOW = EngineWindow(sequences=32, step_tokens=2_048)


class Fifo(Turns):
    """The wrong implementation: the engine gets everything in order of arrival, as its own queue would."""

    def begin(self) -> Turn | None:
        waiting = [tenant.queue[0] for tenant in self._tenants.values() if tenant.queue]
        turn = min(waiting, key=lambda turn: turn._key, default=None)
        if turn is None or self.places + turn.places > WINDOW.sequences:
            return None
        return self._enter(turn)


class Rounds(Turns):
    """Another wrong one: tenants take turns by requests, whatever these cost."""

    def generate(self, turn: Turn, tokens: int) -> bool:  # noqa: ARG002
        return super().generate(turn, 0)

    def _enter(self, turn: Turn) -> Turn:
        before = turn._tenant.counter
        super()._enter(turn)
        turn._tenant.counter = before + 1
        return turn


class Sorting(Turns):
    """One that looks at every tenant for each decision."""

    def begin(self) -> Turn | None:
        order = sorted((tenant for tenant in self._tenants.values() if tenant.queue), key=lambda one: one.entry[:2])
        return self._enter(order[0].queue[0]) if order and self._fits(order[0].queue[0], 1) else None


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


@dataclass
class Model:
    """The rules again, each as a sum over everything that ever happened."""

    window: EngineWindow
    jobs: list[Job] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    """Of each request: waiting, ahead, running, over."""
    left: list[int] = field(default_factory=list)
    """Sequences of each request that have not ended."""
    counters: dict[str, int] = field(default_factory=dict)
    since: dict[str, int] = field(default_factory=dict)
    """The number of the request with which each tenant's queue began."""
    last: str = ""

    def numbers(self, *states: str, tenant: str | None = None) -> list[int]:
        jobs = enumerate(self.jobs)
        return [number for number, job in jobs if self.states[number] in states and tenant in (None, job.tenant)]

    def width(self, number: int) -> int:
        return min(self.jobs[number].sequences, self.window.sequences - self.window.sequences // 8)

    def places(self, tenant: str | None = None) -> int:
        inside = self.numbers("ahead", "running", tenant=tenant)
        return sum(min(self.width(number), self.left[number]) for number in inside)

    def join(self, job: Job, turn: Turn) -> None:
        if not self.numbers("waiting", tenant=job.tenant):
            waiting = [self.counters[self.jobs[number].tenant] for number in self.numbers("waiting")]
            least = min(waiting) if waiting else self.counters.get(self.last, 0)
            self.counters[job.tenant] = max(self.counters.get(job.tenant, 0), least)
            self.since[job.tenant] = len(self.jobs)
        self.jobs.append(job)
        self.turns.append(turn)
        self.states.append("waiting")
        self.left.append(job.sequences)

    def fits(self, number: int, width: int) -> bool:
        tenant = self.jobs[number].tenant
        ahead = self.numbers("ahead")
        own = [one for one in ahead if self.jobs[one].tenant == tenant]
        if len(own) >= 2 and sum(self.jobs[one].prompt_tokens for one in ahead) >= 4 * self.window.step_tokens:
            return False
        about = {job.tenant for job in self.jobs}
        active = {self.jobs[one].tenant for one in self.numbers("waiting", "ahead", "running") if self.left[one]}
        short = min(2 * self.window.sequences // self.jobs[number].tokens, self.window.sequences // 2)
        limit = self.window.sequences + max(short, self.window.sequences // 16)
        share = math.ceil(Fraction(self.window.sequences, max(2, len(active))))
        if len(about) > 1 and self.places(tenant) + width > share:
            limit = self.window.sequences - self.window.sequences // 8 + short
        return self.places() + width <= limit

    def next(self) -> int | None:
        """Which request begins now."""
        waiting = self.numbers("waiting")
        firsts = {self.jobs[number].tenant: number for number in reversed(waiting)}

        def rank(number: int) -> tuple[int, int]:
            tenant = self.jobs[number].tenant
            return self.counters[tenant], -self.since[tenant]

        order = sorted(firsts.values(), key=rank)
        for number in order:
            if rank(number)[0] - rank(order[0])[0] > 8 * self.window.sequences:
                return None
            if self.fits(number, self.width(number)):
                return number
            if not self.fits(number, 1):
                return None
        return None

    def begin(self, number: int) -> None:
        self.states[number] = "ahead"
        self.last = self.jobs[number].tenant
        self.counters[self.last] += self.jobs[number].prompt_tokens


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


def play(turns: Turns, steps: list[Job | tuple[str, int]]) -> Model:
    """Requests come, generate, end and are given up at random. Checks every decision against the model."""
    assert turns.window is not None
    model = Model(turns.window)
    for step in steps:
        if isinstance(step, Job):
            turn = turns.join(step.tenant, step.prompt_tokens, max_tokens=step.tokens, sequences=step.sequences)
            model.join(step, turn)
        else:
            _move(turns, model, *step)
        while (number := model.next()) is not None:
            model.begin(number)
            assert turns.begin() is model.turns[number], "another request begins than the rules say"
        assert turns.begin() is None, "a request begins that may not"
        assert turns.places == model.places() <= MOST, "the window is exceeded"
        assert turns.waiting == len(model.numbers("waiting"))
        assert turns.sequences == sum(model.left)
        assert turns.prompt_tokens == sum(model.jobs[one].prompt_tokens for one in model.numbers("waiting", "ahead"))
    return model


def _move(turns: Turns, model: Model, move: str, which: int) -> None:
    states = ("waiting", "ahead", "running") if move == "leave" else ("ahead", "running")
    if not (numbers := model.numbers(*states)):
        return
    number = numbers[which % len(numbers)]
    turn = model.turns[number]
    match move:
        case "generate":
            assert turns.generate(turn, 7) == (model.states[number] == "ahead")
            model.counters[model.jobs[number].tenant] += 7
            model.states[number] = "running"
        case "end":
            turns.end(turn)
            model.left[number] = max(0, model.left[number] - 1)
        case _:
            turns.leave(turn)
            turns.leave(turn)
            model.states[number], model.left[number] = "over", 0


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
    for turn in [turns.join(job.tenant, job.prompt_tokens, sequences=job.sequences) for job in model.jobs]:
        while turns.begin() is not None:
            pass
        turns.leave(turn)
    assert (turns.places, turns.waiting, turns.sequences, turns.prompt_tokens) == (0, 0, 0, 0)


def test_a_mutant_that_keeps_the_entry_of_a_tenant_that_comes_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    list_again = Turns._list
    monkeypatch.setattr(Turns, "_list", lambda self, tenant: None if tenant.listed else list_again(self, tenant))
    with pytest.raises(AssertionError, match="another request begins"):
        play(Turns(WINDOW, Clock()), COMES_BACK)


@pytest.mark.parametrize("is_mutant", [False, True])
def test_a_tenant_that_comes_back_again_and_again_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, is_mutant: bool
) -> None:
    """It has had more than the tenant that waits before it. The mutant never drops a void entry."""
    if is_mutant:
        monkeypatch.setattr(Turns, "_drop_void_entries", lambda _: None)
    turns = Turns(WINDOW, Clock())
    busy = [turns.join("initech", 1), *(turns.join("acme", 1) for _ in range(100))]
    begun(turns)
    turns.generate(busy[0], 100_000)
    for _ in range(10_000):
        turns.leave(turns.join("initech", 1))
    assert (len(turns._heap) > 100) is is_mutant


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


def test_alone_a_tenant_has_the_whole_window_and_the_engine_the_next_one_at_hand() -> None:
    turns = Turns(WINDOW, Clock())
    sent = [turns.join("acme", 10) for _ in range(100)]
    assert begun(turns) == sent[:34]
    turns.leave(sent[3])
    assert begun(turns) == sent[34:35]


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


def test_a_tenant_that_comes_back_has_no_credit_and_no_debt() -> None:
    turns = Turns(WINDOW, Clock())
    busy = [turns.join("acme", 100) for _ in range(60)]
    begun(turns)
    for turn in busy[:20]:
        turns.generate(turn, 10_000)
    globex = [turns.join("globex", 100) for _ in range(60)]
    order: list[str] = []
    for turn in busy[:20]:
        turns.leave(turn)
        order += [one._tenant.name for one in begun(turns)]
    assert len(order) >= 14  # 20 places less the six that only a tenant within its share may have
    assert abs(order.count("acme") - order.count("globex")) <= 1
    assert not globex[0].is_waiting


def test_prompts_ahead_of_the_engine_are_bounded_by_their_tokens_and_never_stop_it() -> None:
    turns = Turns(WINDOW, Clock())
    sent = [turns.join("acme", 3_000) for _ in range(10)]
    assert begun(turns) == sent[:3]  # 9,000 tokens, where four steps take 8,192
    globex = turns.join("globex", 9_000)
    assert begun(turns) == [globex]  # a tenant has two of its own ahead, whatever others have
    turns.generate(sent[0], 1)
    turns.generate(globex, 1)
    assert begun(turns) == sent[3:4]
    huge = Turns(WINDOW, Clock())
    pair = [huge.join("acme", 1_000_000) for _ in range(3)]
    assert begun(huge) == pair[:2]


def test_without_names_or_without_a_window_nothing_waits_and_the_order_is_that_of_arrival() -> None:
    for turns, name in ((Turns(WINDOW, Clock()), ""), (Turns(None, Clock()), "acme")):
        for number in range(1_000):
            turn = turns.join(name, 5_000, sequences=1 + number % 40)
            assert turns.begin() is turn
        assert turns.waiting == 0


def test_a_lower_priority_begins_earlier_among_those_of_its_tenant_only() -> None:
    turns = Turns(EngineWindow(1, 100), Clock())
    running = [turns.join("acme", 10), turns.join("acme", 10)]
    assert begun(turns) == running
    late, early = turns.join("acme", 10, priority=5), turns.join("acme", 10, priority=-5)
    first = turns.join("globex", 10, priority=100)
    order = []
    for turn in (*running, first, early, late):
        turns.leave(turn)
        order += begun(turns)
    assert order == [first, early, late]


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
