"""The circuit breaker, against a slow model that remembers everything, and mutants that the model catches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from semel.embeddings.nodes import Breaker
from tests.embeddings.stores import Script, play

STEPS = settings(max_examples=100, stateful_step_count=40, deadline=None)


@dataclass
class Call:
    """One that was let through."""

    state: int
    """How often the state had changed when it began."""
    is_ok: bool | None = None


@dataclass
class Model:
    """Everything that happened. The state is computed from it again at every question."""

    results: list[tuple[Call, bool, float]] = field(default_factory=list)

    def replay(self) -> tuple[int, bool, float]:
        """How often the state changed, whether it is open, and until when."""
        changes, opened, until, failures = 0, False, 0.0, 0
        times = 0  # it has opened, since it was last to be trusted
        successes = 0
        for call, is_ok, at in self.results:
            if call.state != changes + opened:  # a trial is a change of its own
                continue
            if is_ok:
                failures = 0
                successes = 0 if opened else successes + 1
                if opened:
                    changes, opened = changes + 2, False
                elif successes >= 3:
                    times = 0
                continue
            failures += 1
            if opened or failures == 3:
                changes += 2 if opened else 1
                opened, failures, times = True, 0, times + 1
                until = at + min(2 ** (times - 1), 60)
        return changes, opened, until


class Machine(RuleBasedStateMachine):
    make: Callable[[], Breaker] = Breaker

    def __init__(self) -> None:
        super().__init__()
        self.breaker = type(self).make()
        self.model = Model()
        self.now = 1_000.0
        self.calls: list[tuple[int, Call]] = []
        self.trial: Call | None = None

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 2.0, 5.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def begin(self) -> None:
        changes, opened, until = self.model.replay()
        is_trial_out = self.trial is not None and self.trial.is_ok is None
        is_allowed = not opened or (self.now >= until and not is_trial_out)
        permit = self.breaker.begin(self.now)
        assert (permit is not None) == is_allowed
        assert self.breaker.is_closed == (not opened)
        if permit is not None:
            call = Call(changes + opened)
            self.calls.append((permit, call))
            self.trial = call if opened else None

    @rule(number=st.integers(0, 9), is_ok=st.booleans())
    def end(self, number: int, is_ok: bool) -> None:
        if not self.calls:
            return
        permit, call = self.calls.pop(number % len(self.calls))
        call.is_ok = is_ok
        self.model.results.append((call, is_ok, self.now))
        self.breaker.end(permit, self.now, is_ok=is_ok)


def test_a_breaker_does_what_the_model_says() -> None:
    run_state_machine_as_test(Machine, settings=settings(STEPS, max_examples=60))


class _OpensLate(Breaker):
    def end(self, permit: int, now: float, *, is_ok: bool) -> None:
        if not is_ok and self.is_closed and self._failures == 2 and permit == self._epoch:
            self._failures = 1
        super().end(permit, now, is_ok=is_ok)


class _ManyTrials(Breaker):
    def begin(self, now: float) -> int | None:
        if self._is_trial:
            return self._epoch
        return super().begin(now)


class _BelievesStragglers(Breaker):
    def end(self, permit: int, now: float, *, is_ok: bool) -> None:
        super().end(max(permit, self._epoch), now, is_ok=is_ok)


class _WaitsTheSame(Breaker):
    def end(self, permit: int, now: float, *, is_ok: bool) -> None:
        super().end(permit, now, is_ok=is_ok)
        if not self.is_closed:
            self._opened_until = min(self._opened_until, now + 1)


class _NeverForgives(Breaker):
    def end(self, permit: int, now: float, *, is_ok: bool) -> None:
        failures = self._failures
        super().end(permit, now, is_ok=is_ok)
        if is_ok and self.is_closed and permit == self._epoch:
            self._failures = failures


class _ForgetsAtOnce(Breaker):
    def end(self, permit: int, now: float, *, is_ok: bool) -> None:
        super().end(permit, now, is_ok=is_ok)
        if self.is_closed:
            self._backoff_s = 0.0


class _NeverForgets(Breaker):
    def end(self, permit: int, now: float, *, is_ok: bool) -> None:
        super().end(permit, now, is_ok=is_ok)
        self._successes = 0


PASS: Script = (("begin",), ("end", 0, True))
FAIL: Script = (("begin",), ("end", 0, False))
OPEN: Script = 3 * FAIL
SCRIPTS: dict[type[Breaker], Script] = {
    _OpensLate: (*OPEN, ("begin",)),
    _ManyTrials: (*OPEN, ("wait", 1.0), ("begin",), ("begin",)),
    _BelievesStragglers: (("begin",), *OPEN, ("end", 0, True), ("begin",)),
    _WaitsTheSame: (*OPEN, ("wait", 1.0), *FAIL, ("wait", 1.0), ("begin",)),
    _ForgetsAtOnce: (*OPEN, ("wait", 1.0), *PASS, *OPEN, ("wait", 1.0), ("begin",)),
    _NeverForgets: (*OPEN, ("wait", 1.0), *(4 * PASS), *OPEN, ("wait", 1.0), ("begin",)),
    _NeverForgives: (*FAIL, *FAIL, ("begin",), ("end", 0, True), *FAIL, ("begin",)),
}


@pytest.mark.parametrize("mutant", SCRIPTS)
def test_the_model_catches_a_broken_breaker(mutant: type[Breaker]) -> None:
    class Broken(Machine):
        make = mutant

    play(Machine(), SCRIPTS[mutant])
    with pytest.raises(AssertionError):
        play(Broken(), SCRIPTS[mutant])
