"""A process of an engine ends without taking its interpreter apart, after all that asked to run at its exit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import atexit, multiprocessing, os, sys
from semel.engine.quick_exit import exit_quickly, exit_quickly_when_done

class Heavy:
    def __init__(self, notes):
        self.file = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    def __del__(self, write=os.write):
        write(self.file, b"taken apart\\n")

def note(notes, text):
    with open(notes, "a") as file:
        file.write(text + "\\n")

def work(how):
    global kept
    kept = Heavy(how)
    atexit.register(note, how, "at exit")
    if how != "slow":
        exit_quickly_when_done()
    if how == "error":
        raise ValueError("failed")
    if how == "code":
        sys.exit(4)
    if how == "exit":
        sys.exit()

if __name__ == "__main__":
    processes = [multiprocessing.get_context("spawn").Process(target=work, args=(how,)) for how in sys.argv[1:]]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print([process.exitcode for process in processes])
    kept = Heavy("self")
    atexit.register(note, "self", "own exit")
    print("flushed", end="")
    exit_quickly(7)
"""


def test_a_process_that_is_done_skips_the_teardown_and_one_that_fails_does_not(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    cases = {
        "quick": (0, ["at exit"]),
        "exit": (0, ["at exit"]),
        "slow": (0, ["at exit", "taken apart"]),  # the control
        "error": (1, ["at exit", "taken apart"]),
        "code": (4, ["at exit", "taken apart"]),
    }
    command = [sys.executable, str(program), *cases]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    codes = [code for code, _ in cases.values()]
    assert (done.returncode, done.stdout) == (7, f"{codes}\nflushed"), "what is printed is flushed"
    for how, (_, notes) in cases.items():
        assert (tmp_path / how).read_text().splitlines() == notes, how
    assert (tmp_path / "self").read_text() == "own exit\n"


def test_nothing_is_registered_in_a_process_that_nobody_of_multiprocessing_started() -> None:
    program = "from semel.engine.quick_exit import exit_quickly_when_done as q; q(); raise SystemExit(5)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 5
