"""Running a harness in a process of its own, with a deadline, and reading what libFuzzer says at its end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.fuzz.target import Target

_ROOT: Final = Path(__file__).parent.parent.parent
_RSS_LIMIT_MB: Final = 2_048
_INPUT_TIMEOUT_S: Final = 10
"""For one that hangs. One that is slow is found by its CPU time: no neighbour on the machine adds to that."""

_PROCESSES_TIMEOUT_S: Final = 240
"""With processes that have a deadline of their own: it is theirs, and the time that a new one takes to load."""
_GRACE_S: Final = 90.0
"""For imports, the first pass over the corpus, and the end."""

_KILLED: Final = (-9, 137)
_STATUS: Final = re.compile(r"^#(\d+)\s+\w+\s+cov: (\d+) ft: (\d+)", re.MULTILINE)
_EXECUTED: Final = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
_ERROR: Final = re.compile(r"^(?: === Uncaught Python exception: ===\n(.*)|==\d+== ?ERROR: (.*))$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to."""

    seconds: float
    executions: int
    coverage: int
    """Branches of the instrumented code that were taken."""

    features: int
    """Branches and how often they were taken, in powers of two."""

    findings: tuple[Path, ...]
    error: str | None
    """What was found, or why there was no run."""

    log: str


def fuzz(
    target: Target, *, corpus: Path, findings: Path, seconds: int, runs: int = -1, seed: int | None = None
) -> Outcome:
    """Fuzz a target for a time or a number of runs, whichever ends first; new inputs go to `corpus`.

    With a `seed` it tries the same inputs each time, as far as it gets.
    """
    findings.mkdir(parents=True, exist_ok=True)
    before = {*findings.iterdir()}
    options = [f"-max_total_time={seconds}", f"-runs={runs}", "-print_final_stats=1", f"-artifact_prefix={findings}/"]
    options += [] if seed is None else [f"-seed={seed}"]
    began = time.monotonic()
    code, log = _harness(target, [*options, str(corpus)], timeout_s=seconds + _GRACE_S)
    statuses = _STATUS.findall(log)
    executed = _EXECUTED.search(log)
    _, coverage, features = statuses[-1] if statuses else (0, 0, 0)
    return Outcome(
        seconds=time.monotonic() - began,
        executions=int(executed[1]) if executed else int(statuses[-1][0]) if statuses else 0,
        coverage=int(coverage),
        features=int(features),
        findings=tuple(sorted({*findings.iterdir()} - before)),
        error=None if code == 0 else _error(log, code),
        log=log,
    )


def _harness(target: Target, options: Sequence[str], *, timeout_s: float) -> tuple[int, str]:
    input_s = _PROCESSES_TIMEOUT_S if target.starts_processes else _INPUT_TIMEOUT_S
    limits = [f"-rss_limit_mb={_RSS_LIMIT_MB}", f"-timeout={input_s}", f"-report_slow_units={input_s}"]
    command = [sys.executable, "-m", "tools.fuzz.harness", target.name, *limits, *options]
    within_s = timeout_s + input_s
    # A process begins with the peak of memory of whoever started it, so a small one does: ours may be over the limit.
    within = ["timeout", "--foreground", "--signal=KILL", f"{within_s}"]
    with tempfile.TemporaryDirectory(prefix="semel-fuzz-") as temporary:  # libFuzzer ends it without any cleaning up
        done = subprocess.run(
            [*within, *command],
            cwd=_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": temporary},
        )
    late = b"\nthe harness did not end in time" if done.returncode in _KILLED else b""
    return done.returncode, (done.stdout + late).decode(errors="replace")


def _error(log: str, code: int) -> str:
    found = _ERROR.search(log)
    if found:
        return str(found[1] or found[2])
    return f"the process ended with {code}: {log.strip().splitlines()[-1] if log.strip() else 'it said nothing'}"
