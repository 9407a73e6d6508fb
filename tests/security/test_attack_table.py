"""What `scripts/attack` calls kept, and what not; and that a switch of `switches` works in a server's processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tools.security.attack import GROWTH_BYTES, KILLED, MAX_LOST, ROWS, SHIPPED, STOPPED, Line, Row
from tools.security.attacks import ATTACKS
from tools.security.switches import DEFENCES, Switches, environment
from tools.security.watch import Seen

ALONE = Seen([0.1] * 40)
KEPT = Line(Row("an attack"), SHIPPED, GROWTH_BYTES, Seen([0.2] * 40, longest_gap_s=1.0), ALONE)
REPLACED = {"noticed": 21.0, "ready again": 60.0}
SLOW_STEPS = Seen([0.1] * 40, longest_step_s=0.2)
LOST = Seen([0.1] * 20, Counter({"503": MAX_LOST}), events_s={"killed": 0.1})


@pytest.mark.parametrize(
    ("line", "faults"),
    [
        (KEPT, []),
        (replace(KEPT, growth_bytes=GROWTH_BYTES + 1), ["memory"]),
        (replace(KEPT, row=Row("an attack", max_pool_bytes=1), pool_growth_bytes=2), ["memory"]),
        (replace(KEPT, seen=Seen([0.2] * 40, longest_gap_s=1.1)), ["probe"]),
        (replace(KEPT, seen=Seen([0.21] * 40)), ["p95"]),
        (replace(KEPT, seen=Seen([0.49] * 40), alone=SLOW_STEPS), []),
        (replace(KEPT, seen=Seen([0.51] * 40), alone=SLOW_STEPS), ["p95"]),
        (replace(KEPT, seen=Seen([0.49] * 40, longest_step_s=0.2)), ["p95"]),
        (replace(KEPT, seen=Seen([0.1] * 99, Counter({"429": 1}))), ["failed"]),
        (replace(KEPT, seen=Seen([0.1] * 20, Counter(unanswered=20))), ["p95", "failed"]),
        (replace(KEPT, seen=Seen()), ["p95"]),
        (replace(KEPT, seen=Seen([0.1], answers=Counter({"500": 1}))), ["500"]),
        (replace(KEPT, seen=Seen([0.1], answers=Counter(engine_failed=1))), ["500"]),
        (replace(KEPT, row=KILLED, seen=LOST), []),
        (replace(KEPT, row=KILLED, seen=replace(LOST, victim_failures=Counter({"400": 1}))), ["failed"]),
        (replace(KEPT, row=KILLED, seen=replace(LOST, events_s={})), ["failed"]),
        (replace(KEPT, row=STOPPED, seen=Seen([], Counter({"503": 40}), events_s=REPLACED)), []),
        (replace(KEPT, row=STOPPED, seen=Seen(events_s=REPLACED | {"noticed": 31.0})), ["p95"]),
        (replace(KEPT, row=STOPPED, seen=Seen(events_s={"noticed": 21.0})), ["p95"]),
    ],
)
def test_a_line_is_ok_if_every_promise_is_kept(line: Line, faults: list[str]) -> None:
    assert line.faults() == faults
    assert line.cells()[-1] == (f"not ok: {', '.join(faults)}" if faults else "ok")
    undefended = replace(line, against="semel without: a defence").cells()[-1]
    assert undefended == (f"damage: {', '.join(faults)}" if faults else "no damage")
    assert not replace(line, against="semel, one tenant").cells()[-1]


def test_every_attack_has_a_row_and_every_defence_an_attack() -> None:
    assert {row.attack for row in ROWS} == {*ATTACKS, STOPPED.attack}
    assert {row.defence for row in ROWS} == {*DEFENCES, ""}


PROGRAM = """
from semel.frontend.middleware.refusal_rate import AbortThrottle, RefusalLimits
throttle = AbortThrottle(lambda: RefusalLimits(burst=0), now=lambda: 0.0)
throttle.wait_s("alice"), throttle.end("mallory", 0.0)
print(throttle.wait_s("mallory") > 0, flush=True)
input()
print(throttle.wait_s("mallory") > 0)
"""


def test_a_defence_is_switched_off_in_a_process_that_runs(tmp_path: Path) -> None:
    switches = Switches(tmp_path / "switches")
    variables = os.environ | environment(tmp_path / "switches")
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        with switches.off("aborts"):
            assert process.communicate("\n", timeout=30)[0] == "False\n"
