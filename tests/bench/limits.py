"""Whether a benchmark kept its limits: what a test of one asserts, so that one whose checks all fail does not pass."""

from __future__ import annotations

from collections.abc import Iterable

from semel.lab.bench.report import Check

__all__ = ["assert_limits"]


def assert_limits(checks: Iterable[Check], *, slack: float = 1.0) -> None:
    """Every check is as it should be, and there is one that could have failed.

    A figure that other work on the machine can change may miss its limit by a factor, the `slack`; a check without a
    limit is only measured.
    """
    limited = [check for check in checks if check.limit is not None]
    assert limited, "no check has a limit: nothing could have failed"
    missed = [check for check in limited if not check.ok and _missed_by(check) > slack]
    assert not missed, "; ".join(f"{check.name}: {check.value:g}, the limit is {check.limit:g}" for check in missed)


def _missed_by(check: Check) -> float:
    """By which factor a check is on the wrong side of its limit."""
    low, high = sorted((check.value, check.limit or 0.0))
    return high / low if low > 0 else float("inf")
