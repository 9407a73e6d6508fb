"""Outlier ejection: held against a slow model that keeps everything it heard and counts it anew each time."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from random import Random
from typing import Any

import pytest

from semel.fleet.ejection import Attempt, EjectionLimits, OutlierEjection
from tests.effort import examples

NAMES = "abcde"
TENANTS = "abc"


@dataclass(eq=False)
class Request:
    worker: str
    began_in: int
    """How often its worker had been ejected, if it was out then; else -1."""

    is_trial: bool
    tenant: str
    attempt: Attempt
    ended: bool = False


@dataclass
class Model:
    """One worker: the log of all that happened, and what follows from it."""

    eject_after: int
    asked: list[tuple[float, str]]
    """When which tenants sent requests, to any worker."""

    log: list[tuple[float, str]] = field(default_factory=list)
    """`ok T` and `bad T` are verdicts while it served, `out S`, `out_again S` and `back` changes, `charge` a failure
    that is load, `trial T` a trial that failed."""

    requests: list[Request] = field(default_factory=list)

    @property
    def outs(self) -> list[tuple[float, float]]:
        return [(at, float(what.split()[1])) for at, what in self.log if what.startswith("out")]

    def is_alone(self, tenant: str, now: float) -> bool:
        return not any(other != tenant and at >= now - 600 for at, other in self.asked)

    @property
    def is_out(self) -> bool:
        changes = [what for _, what in self.log if what.startswith(("out", "back"))]
        return bool(changes) and changes[-1] != "back"

    @property
    def until(self) -> float:
        at, seconds = self.outs[-1]
        return at + seconds

    @property
    def on_trial(self) -> bool:
        return any(one.is_trial and not one.ended for one in self.requests)

    @property
    def verdicts(self) -> list[tuple[float, str]]:
        """Since it serves."""
        changes = [number for number, (_, what) in enumerate(self.log) if what.startswith(("out", "back"))]
        rest = self.log[changes[-1] + 1 :] if changes else self.log
        return [(at, what) for at, what in rest if what.split()[0] in {"ok", "bad"}]

    def is_outlier(self, tenant: str, now: float) -> bool:
        words = [what for _, what in self.verdicts]
        last = [what for at, what in self.verdicts if at > now - 10]
        if not self.eject_after:
            return False
        row = list(takewhile(lambda what: what.startswith("bad"), reversed(words)))
        alone = self.is_alone(tenant, now)
        if len(row) >= self.eject_after and (alone or len(set(row)) >= 2):
            return True
        failing = [
            one for one in TENANTS if last.count(f"bad {one}") and last.count(f"bad {one}") >= last.count(f"ok {one}")
        ]
        bad = sum(what.startswith("bad") for what in last)
        return len(last) >= 10 and bad >= len(last) / 2 and (alone or len(failing) >= 2)

    def next_s(self, tenant: str, now: float) -> float:
        """How long it would be out, if it were ejected now."""
        if not self.outs:
            return 10.0
        backs = [at for at, what in self.log if what == "back"]
        last_s = self.outs[-1][1]
        if self.is_out:
            began = max(number for number, (_, what) in enumerate(self.log) if what.startswith("out "))
            trials = {what for _, what in self.log[began:] if what.startswith("trial")} | {f"trial {tenant}"}
            if len(trials) == 1 and not self.is_alone(tenant, now):
                return last_s
        return 10.0 if not self.is_out and now - backs[-1] >= last_s else min(300.0, 2 * last_s)

    def load(self, now: float) -> int:
        return sum(what == "charge" and at > now - 10 for at, what in self.log)

    def succeed(self, request: Request, now: float) -> bool:
        request.ended = True
        if not self.is_out:
            self.log.append((now, f"ok {request.tenant}"))
        elif request.began_in == len(self.outs):
            self.log.append((now, "back"))
            return True
        return False

    def fail(self, request: Request, now: float) -> float:
        request.ended = True
        if self.is_out and not request.is_trial:
            return 0.0
        seconds = self.next_s(request.tenant, now)
        if self.is_out:
            self.log += [(now, f"trial {request.tenant}"), (now, f"out_again {seconds}")]
            return seconds
        self.log.append((now, f"bad {request.tenant}"))
        if not self.is_outlier(request.tenant, now):
            return 0.0
        self.log.append((now, f"out {seconds}"))
        return seconds


def scanned(ejection: OutlierEjection, workers: Sequence[str], now: float, preparing: Container[str]) -> list[str]:
    """Those of the workers that may get a request, by a look at each of them."""
    out = {}
    for worker in ejection._ejected.intersection(workers):
        record = ejection._records[worker]
        until = record.out_until or 0.0
        if now < until or record.trial is not None or worker in preparing:
            out[worker] = until
    farthest = set(sorted(out, key=lambda worker: (-out[worker], worker))[: len(workers) // 2])
    return [worker for worker in workers if worker not in farthest]


class Machine:
    """Workers that come and go, requests that end well, badly or without a verdict, in any order."""

    def __init__(self, make: type[OutlierEjection], count: int, eject_after: int) -> None:
        self.now = 0.0
        self.eject_after = eject_after
        self.tested = make(EjectionLimits(eject_after), now=lambda: self.now)
        self.asked: list[tuple[float, str]] = []
        self.models = {name: Model(eject_after, self.asked) for name in NAMES[:count]}

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def ask(self, which: int, ends: list[tuple[str, str]]) -> None:
        """Requests one after another, each of which ends at once."""
        for end, tenant in ends:
            self.begin(which, tenant)
            self.end(-1, end)

    def begin(self, which: int, tenant: str) -> None:
        name = sorted(self.models)[which % len(self.models)]
        model = self.models[name]
        is_trial = model.is_out and self.now >= model.until and not model.on_trial
        attempt = self.tested.begin(name, tenant)
        assert attempt.is_trial == is_trial
        self.asked.append((self.now, tenant))
        model.requests.append(Request(name, len(model.outs) if model.is_out else -1, is_trial, tenant, attempt))

    def end(self, which: int, how: str) -> None:
        opened = [one for model in self.models.values() for one in model.requests if not one.ended]
        if not opened:
            return
        request = opened[which % len(opened)] if which >= 0 else opened[-1]
        model = self.models[request.worker]
        if how == "x":
            request.ended = True
            self.tested.cancel(request.attempt)
        elif how == "s":
            assert self.tested.succeed(request.attempt) == model.succeed(request, self.now)
        else:
            model.log.append((self.now, "charge"))
            self.tested.charge(request.worker)
            assert self.tested.fail(request.attempt) == model.fail(request, self.now)

    def end_again(self, which: int) -> None:
        """A second verdict on a request changes nothing."""
        ended = [one for model in self.models.values() for one in model.requests if one.ended]
        if ended:
            attempt = ended[which % len(ended)].attempt
            assert self.tested.fail(attempt) == 0
            assert not self.tested.succeed(attempt)

    def replace(self, which: int) -> None:
        """Another worker comes by the name of one that was removed: what the old one left says nothing of it."""
        name = sorted(self.models)[which % len(self.models)]
        left = self.models[name].requests
        self.tested.forget(name)
        self.models[name] = Model(self.eject_after, self.asked)
        for request in left:
            if not request.ended:
                assert self.tested.fail(request.attempt) == 0

    def is_as_the_model_says(self) -> None:
        names = sorted(self.models)
        for name in names:
            assert self.tested.is_ejected(name) == self.models[name].is_out
            assert self.tested.load(name) == self.models[name].load(self.now)
        for preparing in ((), names):
            left_out = set(self.tested.left_out(names, preparing.__contains__))
            assert left_out == set(names) - set(scanned(self.tested, names, self.now, preparing))
            out = [name for name in names if self._is_closed(self.models[name], name in preparing)]
            assert len(left_out) == min(len(out), len(names) // 2), "never more than half are out"
            assert left_out <= set(out)
            nearest = sorted(out, key=lambda name: self.models[name].until)[: len(out) - len(left_out)]
            earliest = max((self.models[name].until for name in nearest), default=0.0)
            assert all(self.models[name].until >= earliest for name in left_out), "the nearest to return are let in"

    def _is_closed(self, model: Model, is_preparing: bool) -> bool:
        return model.is_out and (self.now < model.until or model.on_trial or is_preparing)


def drive(make: type[OutlierEjection], seed: int) -> None:
    """Steps by chance, most of them failures and trials."""
    random = Random(seed)
    machine = Machine(make, random.randint(1, 5), random.choice((0, 1, 2, 3, 5)))
    tenants = random.choice(("a", "ab", TENANTS))
    for _ in range(40):
        which = random.randrange(100)
        match random.randrange(6):
            case 0:
                machine.wait(random.choice((0.0, 0.5, 3.0, 9.5, 10.0, 20.0, 60.0, 150.0, 601.0)))
            case 1:
                ends = random.choices("sfx", random.choice(((2, 6, 1), (5, 5, 1))), k=random.randint(1, 12))
                machine.ask(which, [(end, random.choice(tenants)) for end in ends])
            case 2 | 3:
                machine.begin(which, random.choice(tenants))
            case 4:
                machine.end(which, random.choice("sfx"))
            case _:
                random.choice((machine.end_again,) * 5 + (machine.replace,))(which)
        machine.is_as_the_model_says()


def test_it_does_what_the_model_says() -> None:
    for seed in range(examples(300)):
        drive(OutlierEjection, seed)


class NeverDoubles(OutlierEjection):
    def _eject(self, worker: str, record: Any, now: float, seconds: float) -> float:  # noqa: ARG002
        return super()._eject(worker, record, now, 10.0)


class EjectsAll(OutlierEjection):
    def left_out(self, workers: Any, is_preparing: Any) -> list[str]:  # noqa: ARG002
        return [worker for worker in workers if self.is_ejected(worker)]


class TrialsAtWill(OutlierEjection):
    def begin(self, worker: str, tenant: str = "") -> Attempt:
        attempt = super().begin(worker, tenant)
        attempt.record.trial = None
        return attempt


class HearsThePast(OutlierEjection):
    def succeed(self, attempt: Attempt) -> bool:
        attempt.ejection = attempt.record.ejections
        return super().succeed(attempt)


class ForgetsTheShare(OutlierEjection):
    def _judge(self, record: Any, verdict: Any) -> None: ...


class KnowsNoTenants(OutlierEjection):
    def begin(self, worker: str, tenant: str = "") -> Attempt:  # noqa: ARG002
        return super().begin(worker)


@pytest.mark.parametrize(
    "wrong", [NeverDoubles, EjectsAll, TrialsAtWill, HearsThePast, ForgetsTheShare, KnowsNoTenants]
)
def test_mutant_the_model_notices(wrong: type[OutlierEjection]) -> None:
    with pytest.raises(AssertionError):
        for seed in range(300):
            drive(wrong, seed)
