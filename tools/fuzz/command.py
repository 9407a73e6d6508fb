"""`scripts/fuzz`: one target or all of them for a while, what it came to, and how to repeat what was found."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tools.fuzz.reach import Step, reached
from tools.fuzz.running import Outcome, fuzz
from tools.fuzz.target import Target
from tools.fuzz.targets import TARGETS, find

_DEFAULT_S: Final = 60
_LONGEST_S: Final = 86_400
"""After which a number of runs is given up."""

_KEPT_FILES: Final = 8
_KEPT_BYTES: Final = 1_024


def main(arguments: Sequence[str]) -> int:
    """The exit code: 1 if something was found."""
    options = _parser().parse_args(arguments)
    if options.list:
        for target in TARGETS:
            _say(f"{target.name:12} {target.about}")
        return 0
    if options.seeds:
        for target in TARGETS:
            _say(f"{target.name:12} {write_seeds(target)} seeds")
        return 0
    if options.all:
        return max(_fuzz(target, options) for target in TARGETS)
    if options.target is None:
        _parser().error("name a target, or --all; --list shows them")
    target = find(options.target)
    if options.repeat is not None:
        target.run()(options.repeat.read_bytes())
        _say(f"{target.name}: nothing is wrong with {options.repeat}")
        return 0
    return _fuzz(target, options)


def write_seeds(target: Target) -> int:
    """Write the inputs that a corpus begins with; others are left as they are. How many there are."""
    target.corpus.mkdir(parents=True, exist_ok=True)
    seeds = target.seeds()
    for name, data in seeds.items():
        (target.corpus / name).write_bytes(data)
    return len(seeds)


def _fuzz(target: Target, options: argparse.Namespace) -> int:
    if options.scratch is None:
        scratch = Path(tempfile.mkdtemp(prefix=f"semel-fuzz-{target.name}-"))
    else:
        scratch = options.scratch / target.name if options.all else options.scratch
    corpus, findings = scratch / "corpus", scratch / "findings"
    corpus.mkdir(parents=True, exist_ok=True)
    for path in target.inputs():
        shutil.copy(path, corpus / path.name)
    seconds = options.seconds or round(60 * (options.minutes or 0)) or (_LONGEST_S if options.runs else _DEFAULT_S)
    outcome = fuzz(target, corpus=corpus, findings=findings, seconds=seconds, runs=options.runs or -1)
    (scratch / "log").write_text(outcome.log)
    if options.keep:
        _say(f"{target.name}: {_keep(target, corpus)} inputs kept in {target.corpus}")
    _tell(target, outcome, scratch)
    return 0 if outcome.error is None else 1


def _keep(target: Target, corpus: Path) -> int:
    """Take the shortest of the inputs that reach something new into the repository; the corpus there stays small."""
    run = target.run()
    packages = target.instrumented
    known: set[Step] = set()
    for path in target.inputs():
        known |= reached(run, path.read_bytes(), packages)
    kept = 0
    for path in sorted(corpus.iterdir(), key=lambda path: path.stat().st_size):
        if kept == _KEPT_FILES or path.stat().st_size > _KEPT_BYTES:
            break
        if new := reached(run, path.read_bytes(), packages) - known:
            known |= new
            shutil.copy(path, target.corpus / path.name)
            kept += 1
    return kept


def _tell(target: Target, outcome: Outcome, scratch: Path) -> None:
    rate = outcome.executions / outcome.seconds if outcome.seconds else 0.0
    _say(
        f"{target.name}: {outcome.seconds:.0f} s, {outcome.executions:,} executions, {rate:,.0f}/s, "
        f"coverage {outcome.coverage}, features {outcome.features}, {len(outcome.findings)} findings; {scratch}"
    )
    if outcome.error is not None:
        _say(f"{target.name}: {outcome.error}")
    for path in outcome.findings:
        _say(f"repeat: scripts/fuzz {target.name} --repeat {path}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description="Coverage-guided fuzzing.")
    parser.add_argument("target", nargs="?", help="a name of --list")
    parser.add_argument("--all", action="store_true", help="every target, one after the other; also after a finding")
    parser.add_argument("--list", action="store_true", help="show the targets")
    parser.add_argument("--seeds", action="store_true", help="write the seeds of every target into the repository")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=int, help=f"how long to fuzz; {_DEFAULT_S} unless --runs is given")
    length.add_argument("--minutes", type=float, help="the same in minutes")
    length.add_argument("--runs", type=int, help="how many inputs to try")
    parser.add_argument("--keep", action="store_true", help="take new inputs into the repository's corpus")
    parser.add_argument(
        "--scratch", type=Path, metavar="FOLDER", help="where corpus, findings and log go; a new folder"
    )
    parser.add_argument("--repeat", type=Path, metavar="FILE", help="run one input, without the fuzzer")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
