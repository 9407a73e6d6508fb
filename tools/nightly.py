"""What is too long for CI, one step after the other, within a budget: `python -m tools.nightly --budget 100m`.

docs/project/nightly.md has a row for each step, with its command, the date, the commit and the minutes of its last run.
A run begins with what has no row, the most important first, and goes on with what was run longest ago, as far as
the budget allows; so a few runs are a whole night. A step that fails does not stop the others: the page says so, and so
does the exit code. The output of each step is in build/nightly.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["Row", "Step", "ordered", "read", "steps", "written"]

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = ROOT / "docs/project/nightly.md"
OUTPUT: Final = ROOT / "build/nightly"

NO_LIMIT_S: Final = 12 * 3_600
_LATE: Final = 1.5
_LATE_S: Final = 300
"""A step may take so many times what it took before, and so many seconds more; then it is ended."""

_GREEN: Final = "green"
_ROW: Final = re.compile(r"^\| ([^|]+) \| `([^`]+)` \| (\S+) \| (\S+) \| ([\d.]+) \| ([^|]+) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Step:
    """A command of the night."""

    name: str
    command: str
    minutes: float
    """What it takes, until a row says it."""

    brief: str | None = None
    """The command at its smallest; None: as it is."""


@dataclass(frozen=True)
class Row:
    """The last run of a step."""

    name: str
    command: str
    date: str
    commit: str
    minutes: float
    result: str

    @property
    def is_green(self) -> bool:
        return self.result == _GREEN

    def __str__(self) -> str:
        return f"| {self.name} | `{self.command}` | {self.date} | {self.commit} | {self.minutes:.1f} | {self.result} |"


_COMMANDS: Final = (
    Step("families", "scripts/families", 60, "scripts/families mistral3"),
    Step("matrix", "scripts/matrix", 60, "scripts/matrix plain --requests 10"),
    Step(
        "prove",
        "semel prove --requests 20000 --seed 2 --report build/prove",
        12,
        "semel prove --modelless --requests 100 --report build/prove",
    ),
    Step("faults", "scripts/faults", 25, "scripts/faults --brief"),
    Step("door: families", "scripts/families --door", 45, "scripts/families --door qwen2-vl"),
    Step("door: load", "scripts/door-load --requests 1000", 15, "scripts/door-load --requests 100 --without-kill"),
    Step("load", "scripts/load --requests 10000", 25, "scripts/load --requests 100"),
    Step(
        "load: compare",
        "scripts/load --compare --requests 300 --rounds 4",
        30,
        "scripts/load --compare --requests 60 --rounds 1",
    ),
    Step("load: tcp", "scripts/load --requests 2000 --transport tcp", 8, "scripts/load --requests 100 --transport tcp"),
    Step("attack", "scripts/attack --seconds 8", 30, "scripts/attack --only stalled --against semel --seconds 2"),
    Step("shares", "scripts/shares", 5, "scripts/shares --requests 20"),
    Step("failing worker", "scripts/failing-worker", 45, "scripts/failing-worker --seconds 10 --workers 3 --rates 20"),
    Step("clients", "scripts/clients", 15, "scripts/clients openai"),
    Step("hostile", "scripts/hostile --files 100000", 60, "scripts/hostile --files 200"),
    Step("fuzz", "scripts/fuzz --all --minutes 3", 90, "scripts/fuzz --all --seconds 5"),
    Step("vLLM 0.31", "scripts/compat 0.31.0", 10, "scripts/compat 0.31.0 --static"),
    Step("mutants", "scripts/mutants", 15, "scripts/mutants --only tenant"),
    Step("layouts", "scripts/layouts", 30, "scripts/layouts qwen2-vl --count 30"),
    Step("bench serve", "semel bench serve", 45, "semel bench serve --quick --only text"),
    Step("bench door", "semel bench serve --door", 45, "semel bench serve --door --quick --only text"),
    Step("bench batch", "semel bench batch", 15),
    Step("bench processing", "semel bench processing", 3, "semel bench processing --quick"),
    Step("bench encoder", "semel bench encoder", 5, "semel bench encoder --quick"),
    Step("bench cache", "semel bench cache", 3, "semel bench cache --quick"),
    Step("bench streams", "semel bench streams", 5, "semel bench streams --streams 200 --seconds 5"),
    Step("bench fleet", "semel bench fleet", 5, "semel bench fleet --quick"),
    Step("rollouts in plain vLLM", "python -m tools.engine.rl_loop", 10),
    Step("first answer", "scripts/first-answer", 5, "scripts/first-answer --here"),
    Step("fresh fleet", "scripts/fresh-fleet", 10),
    Step("mistakes", "scripts/mistakes --again", 15, "scripts/mistakes --again 'a comma in a number'"),
    Step("sizes", "scripts/sizes", 30, "scripts/sizes mistral3 --count 20"),
    Step("generic cost", "scripts/generic-cost --count 100", 10, "scripts/generic-cost --count 10"),
    Step("grammars", "scripts/grammars --count 2000", 15, "scripts/grammars --count 20"),
    Step("grammars: forms", "scripts/grammars --forms", 20, "scripts/grammars --forms --modes sync --only 'e e e'"),
    Step("large fleets", "python -m tools.fleet.trace_makespans 3000", 10, "python -m tools.fleet.trace_makespans 3"),
    Step("real sockets", "python -m tools.simulate.real_sockets --fit 40 --seed 41", 10),
    Step("locks", "scripts/lock --check", 3),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--budget", type=_seconds, default=NO_LIMIT_S, metavar="MINUTES", help="such as 100m; no limit without it"
    )
    parser.add_argument("--page", type=Path, default=PAGE, help="the page that is read and written")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="steps whose names begin so")
    parser.add_argument("--brief", action="store_true", help="every step at its smallest, and no page")
    parser.add_argument("--list", action="store_true", help="show the steps and end")
    options = parser.parse_args()
    rows = read(options.page.read_text()) if options.page.exists() else {}
    known = [step for step in steps(_nightly_tests()) if step.name.startswith(tuple(options.only or [""]))]
    if not known:
        sys.exit("there is no such step; --list shows them")
    if options.list:
        print(*(f"{step.name:38} {step.command}" for step in known), sep="\n")
        return
    OUTPUT.mkdir(parents=True, exist_ok=True)
    commit, ends_s, results = _commit(), time.monotonic() + options.budget, []
    for step in ordered(known, rows):
        left_s, expected_s = ends_s - time.monotonic(), 60 * _minutes(step, rows)
        if not options.brief and expected_s > left_s:
            continue
        print(f"scripts/nightly: {step.name}", flush=True)
        command = (step.brief or step.command) if options.brief else step.command
        deadline_s = min(left_s, _LATE * expected_s + _LATE_S)
        minutes, result = _run(step, command, deadline_s)
        results.append(result)
        print(f"scripts/nightly: {step.name}: {result}, {minutes:.1f} minutes", flush=True)
        if not options.brief:
            rows[step.name] = Row(step.name, step.command, str(dt.date.today()), commit, minutes, result)
            options.page.write_text(written(rows, steps(_nightly_tests())))
    sys.exit(any(result != _GREEN for result in results))


def steps(tests: Iterable[str]) -> list[Step]:
    """All steps, the most important first: the files that have tests marked `nightly`, then the commands."""
    files = [Step(file, f"pytest -q -m nightly {file}", 8) for file in tests]
    return [*files, *_COMMANDS]


def ordered(known: Sequence[Step], rows: Mapping[str, Row]) -> list[Step]:
    """Return what was never run or is not green, the most important first, then what was run longest ago."""
    return sorted(known, key=lambda step: row.date if (row := rows.get(step.name)) and row.is_green else "")


def read(page: str) -> dict[str, Row]:
    """Return the rows of a page, by name."""
    return {
        name: Row(name, command, date, commit, float(minutes), result)
        for name, command, date, commit, minutes, result in _ROW.findall(page)
    }


def written(rows: Mapping[str, Row], known: Iterable[Step]) -> str:
    """Return the page of these rows, in the order of the steps; a step that is gone has none."""
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}, no GPU"
    names = [step.name for step in known]
    shown = [rows[name] for name in names if name in rows]
    never = [name for name in names if name not in rows]
    return "\n".join(
        (
            "# What CI is too short for",
            "",
            "The last run of each step of `scripts/nightly`, which begins with what was run longest ago and takes what",
            f"fits its `--budget`. {machine}. A step is green if its command ended with 0.",
            "",
            "| step | command | date | commit | minutes | result |",
            "|---|---|---|---|---|---|",
            *map(str, shown),
            "",
            f"Not run yet: {', '.join(never)}." if never else "Each step has been run.",
            "",
        )
    )


def _minutes(step: Step, rows: Mapping[str, Row]) -> float:
    return max(1.0, rows[step.name].minutes) if step.name in rows else step.minutes


def _nightly_tests() -> list[str]:
    """Return the files with tests that are marked `nightly`."""
    command = [str(ROOT / ".venv/bin/pytest"), "--collect-only", "-q", "-m", "nightly", "-p", "no:cacheprovider"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted({line.partition("::")[0] for line in listed.splitlines() if "::" in line})


def _run(step: Step, command: str, deadline_s: float) -> tuple[float, str]:
    """Run a step with what is installed. Returns its minutes and its result."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}", "CI": "1", "COLUMNS": "120"}
    began = time.monotonic()
    with (OUTPUT / f"{re.sub('[^a-z0-9.]+', '-', step.name.lower())}.log").open("w") as log:
        log.write(f"$ {command}\n")
        log.flush()
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, process_group=0
        )
        try:
            code = process.wait(deadline_s)
            result = _GREEN if code == 0 else f"failed ({code})"
        except subprocess.TimeoutExpired:
            result = "no end"
        with contextlib.suppress(ProcessLookupError):  # what it left behind, too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return (time.monotonic() - began) / 60, result


def _commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def _seconds(text: str) -> float:
    if (match := re.fullmatch(r"(\d+)\s*m?", text)) is None:
        raise argparse.ArgumentTypeError("minutes, such as 100m")
    return 60.0 * int(match[1])


if __name__ == "__main__":
    main()
