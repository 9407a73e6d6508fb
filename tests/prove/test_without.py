"""Each protection can be taken out: what its patch replaces is there."""

from __future__ import annotations

import subprocess
import sys

from semel.lab.prove.without import command_without


def test_every_protection_can_be_taken_out_of_a_process() -> None:
    program = "from semel.lab.prove.without import PROTECTIONS; [one() for one in PROTECTIONS.values()]"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_command_without_a_protection_is_the_semel_command() -> None:
    words = [*command_without("repair"), "frontend", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert "Start a frontend" in done.stdout
