"""A benchmark that does not keep its limits fails: its command, and the tests of it. B5 is held by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from semel.core import Timeline
from semel.encoder.eviction import CostAware, Entry
from semel.lab.bench import cache as cache_bench
from semel.lab.bench import encoder as encoder_bench
from semel.lab.bench.report import Check, Report
from semel.lab.cli.benches import bench
from tests.bench.limits import assert_limits

GOOD = Report("sample", {}, (Check.at_least("speed", 12.0, 10, unit="×"), Check("seen", 3.0, "items")))
BAD = Report("sample", {}, (Check.at_least("speed", 1.0, 10, unit="×"), Check.at_most("memory", 80.0, 4, unit="MB")))


def exit_code_of(report: Report, monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    monkeypatch.setattr(cache_bench, "run", lambda *, quick: report)  # noqa: ARG005
    return CliRunner().invoke(bench, ["cache", "--quick", *flags]).exit_code


def check_the_command_tells_whether_limits_were_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags in ((), ("--json",)):
        assert exit_code_of(GOOD, monkeypatch, *flags) == 0
        assert exit_code_of(BAD, monkeypatch, *flags) == 1


def test_the_exit_code_of_a_bench_whose_checks_fail_is_1(monkeypatch: pytest.MonkeyPatch) -> None:
    check_the_command_tells_whether_limits_were_kept(monkeypatch)


def test_a_mutant_whose_reports_are_always_ok_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Report, "ok", property(lambda _: True))
    with pytest.raises(AssertionError):
        check_the_command_tells_whether_limits_were_kept(monkeypatch)


@pytest.mark.parametrize(
    "checks",
    [BAD.checks, (*GOOD.checks, *BAD.checks), GOOD.checks[1:], (Check.at_most("left", 0.0, -1, unit="items"),)],
    ids=["all fail", "some fail", "none could fail", "a count of nothing"],
)
def test_a_mutant_bench_whose_checks_fail_or_cannot_does_not_pass_for_a_good_one(checks: tuple[Check, ...]) -> None:
    assert_limits(GOOD.checks)
    for slack in (1.0, 2.0):
        with pytest.raises(AssertionError):
            assert_limits(checks, slack=slack)


def planned() -> Iterator[Check]:
    return encoder_bench._planning_step(turns=5)


def evicted() -> Iterator[Check]:
    return encoder_bench._eviction(shows=3_000)


def looked_up() -> Iterator[Check]:
    return cache_bench._looking_up(turns=5)


@pytest.mark.slow
def test_what_needs_no_engine_keeps_its_limits() -> None:
    assert_limits(evicted(), slack=1.6)  # of a short trace; the same on every machine
    assert_limits(planned(), slack=2)
    assert_limits(looked_up(), slack=10)


def scan(self: Timeline, start: int, end: int) -> tuple[int, int]:
    inside = [index for index, place in enumerate(self) if place.offset < end and place.end > start]
    return inside[0], inside[-1] + 1


ADMIT = CostAware.admit


def admit_at_one_price(self: CostAware, entry: Entry) -> bool:
    entry.cost, entry.shows = entry.size, 1
    return ADMIT(self, entry)


MUTANTS: dict[str, tuple[object, str, Any, Callable[[], Iterator[Check]], float]] = {
    "a window that scans": (Timeline, "window", scan, planned, 2),
    "a policy that knows no costs": (CostAware, "admit", admit_at_one_price, evicted, 1.6),
}


# The mutant of B5 is found by counting, in tests/encoder/test_cost.py, and by the bench of releases where vLLM is.
@pytest.mark.slow
@pytest.mark.parametrize(("owner", "name", "wrong", "measure", "slack"), MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_of_the_encoder_makes_its_bench_fail(
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    wrong: Any,
    measure: Callable[[], Iterator[Check]],
    slack: float,
) -> None:
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(AssertionError, match="the limit is"):
        assert_limits(measure(), slack=slack)
