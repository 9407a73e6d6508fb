"""A process of an engine ends without taking its interpreter apart, after all that asked to run at its exit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from semel.engine.owner import OWNER

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
    env = os.environ | {OWNER: str(os.getpid())}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    codes = [code for code, _ in cases.values()]
    assert (done.returncode, done.stdout) == (7, f"{codes}\nflushed"), "what is printed is flushed"
    for how, (_, notes) in cases.items():
        assert (tmp_path / how).read_text().splitlines() == notes, how
    assert (tmp_path / "self").read_text() == "own exit\n"


def test_nothing_is_registered_in_a_process_that_nobody_of_multiprocessing_started() -> None:
    program = "from semel.engine.quick_exit import exit_quickly_when_done as q; q(); raise SystemExit(5)"
    env = os.environ | {OWNER: str(os.getpid())}
    assert subprocess.run([sys.executable, "-c", program], env=env, timeout=60, check=False).returncode == 5


FORK = """
import atexit, multiprocessing, os
from semel.engine.quick_exit import exit_quickly_when_done

if __name__ == "__main__":
    me = os.getpid()
    atexit.register(lambda: print("own" if os.getpid() == me else "in a fork", flush=True))
    process = multiprocessing.get_context("fork").Process(target=exit_quickly_when_done)
    process.start()
    process.join()
"""


def test_a_fork_of_a_users_script_does_not_run_what_the_script_does_at_its_exit() -> None:
    """As plain vLLM starts its engine under `LLM`; the control is the same under a worker."""
    plain = {name: value for name, value in os.environ.items() if name != OWNER}
    for env, said in ((plain, ["own"]), (plain | {OWNER: str(os.getpid())}, ["in a fork", "own"])):
        command = [sys.executable, "-c", FORK]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.splitlines() == said
