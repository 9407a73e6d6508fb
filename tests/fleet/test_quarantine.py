"""Requests that were under way when engines died: strikes, isolated retries and refusals."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core import Submission
from semel.errors import NotReady, RequestQuarantined
from semel.fleet.quarantine import KEEP_S, Content, EngineRun, Quarantine, Suspect
from tests.worker.pairing import prompt

K, INNOCENT = Content("tenant", 1), Content("tenant", 2)


@dataclass
class Model:
    """Slow and obviously right: the whole history is kept, and everything is found in it by searching."""

    now: float = 0.0
    history: list[tuple[float, Content, EngineRun | None]] = field(default_factory=list)
    """Strikes with their engine, and clearances without one."""

    def engines(self, content: Content) -> set[EngineRun]:
        """The engines of strikes that still count: 10 minutes after the last one all are forgotten."""
        counted: list[tuple[float, EngineRun]] = []
        for when, whose, engine in self.history:
            if whose != content:
                continue
            if engine is None or (counted and when >= counted[-1][0] + KEEP_S):
                counted = []
            if engine is not None:
                counted.append((when, engine))
        is_over = bool(counted) and self.now >= counted[-1][0] + KEEP_S
        return set() if is_over else {engine for _, engine in counted}


class Play:
    """A fleet of three workers, with engines that die, requests of four contents, and a clock."""

    def __init__(self, seed: int, kind: type[Quarantine] = Quarantine) -> None:
        self.draw = random.Random(seed)
        self.model = Model()
        self.quarantine = kind(now=lambda: self.model.now)
        self.sessions = dict.fromkeys("abc", 1)
        self.under_way: list[Suspect] = []
        self.seconds: set[Suspect] = set()
        self.waiting: list[Suspect] = []

    def run(self) -> None:
        acts = (self.enter, self.enter, self.begin_answer, self.finish, self.leave, self.die, self.pass_time)
        for _ in range(self.draw.randrange(120)):
            self.draw.choice(acts)()
            self.try_again()

    def engine(self) -> EngineRun:
        worker = self.draw.choice("abc")
        return EngineRun(worker, self.sessions[worker])

    def enter(self) -> None:
        content = Content(self.draw.choice("xy"), self.draw.randrange(2))
        strikes = len(self.model.engines(content))
        assert self.quarantine.strikes(content) == strikes
        record = self.quarantine._record(content)
        is_retried = record is not None and record.isolated_retry is not None
        try:
            suspect = self.quarantine.enter(content)
        except RequestQuarantined:
            assert strikes >= 2
        except NotReady:
            assert strikes == 1
            assert is_retried
        else:
            assert strikes < 2
            assert not is_retried
            self.quarantine.submit(suspect, self.engine())
            self.under_way.append(suspect)

    def begin_answer(self) -> None:
        if self.under_way:
            self.quarantine.release_engine(self.draw.choice(self.under_way))

    def finish(self) -> None:
        if (suspect := self.take()) is not None:
            self.quarantine.finish(suspect)
            self.model.history.append((self.model.now, suspect.content, None))

    def leave(self) -> None:
        if (suspect := self.take()) is not None:
            self.quarantine.leave(suspect)

    def take(self) -> Suspect | None:
        return self.under_way.pop(self.draw.randrange(len(self.under_way))) if self.under_way else None

    def die(self) -> None:
        engine = self.engine()
        there = [one for one in self.under_way if one.engine == engine]
        isolated = [one for one in there if one.is_isolated]
        assert len(isolated) <= 1, "one at a time"
        had_strikes = {one.content for one in there if self.model.engines(one.content)}
        for one in there:
            if not isolated or one in isolated or one.content not in had_strikes:
                self.model.history.append((self.model.now, one.content, engine))
        self.draw.shuffle(there)
        for one in there:
            self.quarantine.die(one)
            self.under_way.remove(one)
            if one not in self.seconds:
                self.waiting.append(one)
        for one in there:
            assert self.quarantine.strikes(one.content) == len(self.model.engines(one.content))
        self.sessions[engine.worker] += 1

    def pass_time(self) -> None:
        self.model.now += self.draw.choice([0.0, 1.0, 200.0, KEEP_S])

    def try_again(self) -> None:
        for suspect in list(self.waiting):
            engine = self.engine()
            if self.quarantine.strikes(suspect.content) < 2 and self.quarantine.may_retry_isolated(
                suspect, engine.worker
            ):
                self.waiting.remove(suspect)
                self.seconds.add(suspect)
                self.quarantine.submit(suspect, engine, isolated=True)
                self.under_way.append(suspect)


@given(st.integers(0, 2**32))
def test_strikes_are_those_of_a_model_that_keeps_the_whole_history(seed: int) -> None:
    Play(seed).run()


class Unfair(Quarantine):
    """Gives everybody a strike, whether isolated or not."""

    def die(self, suspect: Suspect) -> None:
        assert suspect.engine is not None
        self._strike(suspect.content, suspect.engine)
        super().die(suspect)


def test_the_model_tells_apart_a_rule_that_gives_everybody_a_strike() -> None:
    with pytest.raises(AssertionError):
        for seed in range(300):
            Play(seed, Unfair).run()


def engine(name: str, session: int = 1) -> EngineRun:
    return EngineRun(name, session)


def under_way_when_a_died(quarantine: Quarantine) -> list[Suspect]:
    """An innocent request and a killer, which were both there."""
    both = [quarantine.enter(INNOCENT), quarantine.enter(K)]
    for one in both:
        quarantine.submit(one, engine("a"))
    for one in both:
        quarantine.die(one)
    return both


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_engine_that_a_lone_suspect_killed_is_no_second_strike_for_others(order: tuple[int, int]) -> None:
    """Whoever is told first. The other had been under way with it before, and had begun to answer."""
    quarantine = Quarantine(now=lambda: 0.0)
    both = under_way_when_a_died(quarantine)
    quarantine.submit(both[0], engine("b"), isolated=True)
    assert not quarantine.may_retry_isolated(both[1], "b")
    quarantine.release_engine(both[0])
    quarantine.submit(both[1], engine("b"), isolated=True)
    for number in order:
        quarantine.die(both[number])
    assert (quarantine.strikes(INNOCENT), quarantine.strikes(K)) == (1, 2)


class Hasty(Quarantine):
    """The mutant: an isolated request at an engine that dies gets a strike, also one that came when it was dead."""

    def die(self, suspect: Suspect) -> None:
        self._blamed.clear()
        super().die(suspect)


@pytest.mark.parametrize(("kind", "strikes"), [(Quarantine, 1), (Hasty, 2)])
def test_who_comes_to_an_engine_that_has_just_died_of_another_gets_no_second_strike(
    kind: type[Quarantine], strikes: int
) -> None:
    """That the killer's request has failed is known a moment before its worker is gone."""
    quarantine = kind(now=lambda: 0.0)
    both = under_way_when_a_died(quarantine)
    quarantine.submit(both[1], engine("b"), isolated=True)
    quarantine.die(both[1])
    assert quarantine.may_retry_isolated(both[0], "b"), "nobody is there any more"
    quarantine.submit(both[0], engine("b"), isolated=True)
    quarantine.die(both[0])
    assert (quarantine.strikes(INNOCENT), quarantine.strikes(K)) == (strikes, 2)


def test_content_is_of_a_tenant_and_not_of_its_sampling_parameters_or_salt() -> None:
    one = Submission("r1", prompt([1]), {}, {"seed": 1}, "\0acme\n")
    assert Content.of(one) == Content.of(Submission("r2", prompt([1]), {}, {"seed": 2}, "\0acme\n\1salt"))
    assert Content.of(one) != Content.of(Submission("r1", prompt([2]), {}, {}, "\0acme\n"))
    assert Content.of(one) != Content.of(Submission("r1", prompt([1]), {}, {}, "\0other\n"))


def test_the_strikes_of_one_tenant_forget_nothing_of_another() -> None:
    quarantine = Quarantine(now=lambda: 0.0)
    for number, content in enumerate([K, *(Content("many", n) for n in range(256)), K]):
        suspect = Suspect(content, engine("a", number))
        quarantine.die(suspect)
    assert quarantine.strikes(K) == 2
