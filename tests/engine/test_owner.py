"""Processes that an engine spawns end with the worker that started them, in every generation."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from semel.engine.owner import OWNER, end_with_owner, owning
from tests.waiting import until

PROGRAM = """
import multiprocessing, os, sys, time
from semel.engine.owner import end_with_owner, owning
if {watches}:
    end_with_owner()  # as `semel.cli` does, which a spawned process imports before all else

def run(generations, method):
    if {forked_watches}:
        end_with_owner()
    print(os.getpid(), flush=True)
    if generations:
        child = multiprocessing.get_context(method).Process(target=run, args=(generations - 1, method))
        child.start()
        child.join()
    time.sleep(600)

if __name__ == "__main__":
    with owning():
        run(2, sys.argv[1])
"""
GENERATIONS = 3


@contextmanager
def family(program: Path, method: str) -> Iterator[list[psutil.Process]]:
    """A worker, a child of it, and a child of that."""
    with subprocess.Popen([sys.executable, program, method], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        processes = [psutil.Process(int(worker.stdout.readline())) for _ in range(GENERATIONS)]
        try:
            yield processes
        finally:
            for process in processes:
                if process.is_running():
                    process.kill()


def gone(processes: list[psutil.Process]) -> bool:
    return not [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("method", ["spawn", "fork"])
async def test_what_an_engine_starts_ends_when_the_worker_is_killed(method: str, tmp_path: Path) -> None:
    program = tmp_path / "worker.py"
    program.write_text(PROGRAM.format(watches=method == "spawn", forked_watches=method == "fork"))
    with family(program, method) as (worker, *engine):
        worker.kill()
        await until(lambda: gone(engine), within_s=10)


async def test_without_the_watch_it_stays_for_ever(tmp_path: Path) -> None:
    """Control: nothing else ends it."""
    program = tmp_path / "worker.py"
    program.write_text(PROGRAM.format(watches=False, forked_watches=False))
    with family(program, "spawn") as (worker, *engine):
        worker.kill()
        worker.wait(10)
        assert not psutil.wait_procs(engine, timeout=1)[0]


async def test_a_hung_parent_in_between_keeps_nobody(tmp_path: Path) -> None:
    program = tmp_path / "worker.py"
    program.write_text(PROGRAM.format(watches=True, forked_watches=False))
    with family(program, "spawn") as (worker, core, last):
        core.suspend()
        worker.kill()
        await until(lambda: gone([last]), within_s=10)


def test_the_command_watches_as_soon_as_it_is_imported() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    environment = os.environ | {OWNER: str(ended.pid)}
    done = subprocess.run([sys.executable, "-c", "import semel.cli"], env=environment, check=False)
    assert done.returncode == -9


def test_the_worker_itself_and_processes_without_an_owner_watch_nobody() -> None:
    end_with_owner()
    with owning():
        assert os.environ[OWNER] == str(os.getpid())
        end_with_owner()
    assert OWNER not in os.environ
