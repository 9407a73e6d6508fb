"""Every attack of `scripts/attack` has its row, and what its switches replace is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.security.attack import ROWS, STOPPED
from tools.security.attacks import ATTACKS
from tools.security.switches import DEFENCES, REPLACED, Switches, environment


def test_every_attack_has_a_row_and_every_defence_an_attack() -> None:
    assert {row.attack for row in ROWS} == {*ATTACKS, STOPPED.attack}
    assert {row.defence for row in ROWS} == {*DEFENCES, ""}


@pytest.mark.slow
def test_what_a_switch_replaces_is_there(tmp_path: Path) -> None:
    """A module that was moved or a name that is gone would leave a defence on."""
    Switches(tmp_path / "switches")
    variables = os.environ | environment(tmp_path / "switches")
    program = "import sys, importlib; [importlib.import_module(name) for name in sys.argv[1:]]"
    subprocess.run([sys.executable, "-c", program, *REPLACED], env=variables, timeout=60, check=True)
