"""A process of an engine ends without taking its interpreter apart, after all that asked to run at its exit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit, multiprocessing, os, sys
from semel.engine.quick_exit import exit_quickly, exit_quickly_when_done

class Heavy:
    def __init__(self):
        self.file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
    def __del__(self, write=os.write):
        write(self.file, b"taken apart\\n")

def note(text):
    with open(sys.argv[1], "a") as file:
        file.write(text + "\\n")

def work(how):
    global kept
    kept = Heavy()
    atexit.register(note, "at exit")
    if how != "slow":
        exit_quickly_when_done()
    if how == "error":
        raise ValueError("failed")
    if how == "code":
        sys.exit(4)
    if how == "exit":
        sys.exit()

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=work, args=(sys.argv[2],))
    process.start()
    process.join()
    print(process.exitcode)
    if sys.argv[2] == "self":
        kept = Heavy()
        atexit.register(note, "own exit")
        print("flushed", end="")
        exit_quickly(7)
"""


def run(tmp_path: Path, how: str) -> tuple[int, str, list[str]]:
    program, notes = tmp_path / "program.py", tmp_path / "notes"
    program.write_text(PROGRAM)
    notes.write_text("")
    command = [sys.executable, str(program), str(notes), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, notes.read_text().splitlines()


@pytest.mark.parametrize(
    ("how", "code", "notes"),
    [
        ("quick", "0", ["at exit"]),
        ("exit", "0", ["at exit"]),
        ("slow", "0", ["at exit", "taken apart"]),  # the control
        ("error", "1", ["at exit", "taken apart"]),
        ("code", "4", ["at exit", "taken apart"]),
    ],
)
def test_a_process_that_is_done_skips_the_teardown_and_one_that_fails_does_not(
    how: str, code: str, notes: list[str], tmp_path: Path
) -> None:
    assert run(tmp_path, how) == (0, f"{code}\n", notes)


def test_what_is_registered_runs_and_what_is_printed_is_flushed(tmp_path: Path) -> None:
    code, printed, notes = run(tmp_path, "self")
    assert (code, printed) == (7, "0\nflushed")
    assert notes == ["at exit", "own exit"]


def test_nothing_is_registered_in_a_process_that_nobody_of_multiprocessing_started() -> None:
    program = "from semel.engine.quick_exit import exit_quickly_when_done as q; q(); raise SystemExit(5)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 5
