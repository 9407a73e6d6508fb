"""Every attack of `scripts/attack` has its row, and a switch of `switches` works in a server's processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tools.security.attack import ROWS, STOPPED
from tools.security.attacks import ATTACKS
from tools.security.switches import DEFENCES, REPLACED, Switches, environment


def test_every_attack_has_a_row_and_every_defence_an_attack() -> None:
    assert {row.attack for row in ROWS} == {*ATTACKS, STOPPED.attack}
    assert {row.defence for row in ROWS} == {*DEFENCES, ""}


def test_what_a_switch_replaces_is_there(tmp_path: Path) -> None:
    """A module that was moved or a name that is gone would leave a defence on."""
    Switches(tmp_path / "switches")
    variables = os.environ | environment(tmp_path / "switches")
    program = "import sys, importlib; [importlib.import_module(name) for name in sys.argv[1:]]"
    subprocess.run([sys.executable, "-c", program, *REPLACED], env=variables, timeout=60, check=True)


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
