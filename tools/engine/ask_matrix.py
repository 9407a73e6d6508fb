"""vLLM's configurations, one after another: bare vLLM and semel under the same flags, and what they answer.

    scripts/matrix                          # all of them
    scripts/matrix v2-async tp2             # these
    scripts/matrix --requests 20            # fewer random requests
    scripts/matrix --json                   # a line of JSON for each
    scripts/matrix --write                  # and write the rows into docs/internals/encoder.md
    scripts/matrix --list                   # names, flags, variables

Each side is asked sixteen probes, then random requests all at once, a tenth of which is aborted, with an encoder cache
and an item cache that have no room for all images. Fails if an answer of semel's is not bare vLLM's, if a planted
fault is not found in the answers, if lazy transfer is on where it should be off or not, or if segments of shared
memory are left.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Final

from semel.lab.testing.models import build
from tools.engine.children import ROOT
from tools.engine.matrix import MATRIX, flags_of
from tools.engine.matrix_page import HEAD, replace_results, row_of
from tools.engine.matrix_parity import MatrixResult, run_configuration

PAGE: Final = ROOT / "docs" / "internals" / "encoder.md"
SHOWN_FAULTS: Final = 5


def main() -> None:
    """Run the configurations of the command line, and show a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", help=f"all by default: {', '.join(MATRIX)}")
    parser.add_argument("--requests", type=int, default=100, help="random requests; the V2 runner gets 30 at most")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each instead of the table")
    parser.add_argument("--write", action="store_true", help="write the rows of these into docs/internals/encoder.md")
    parser.add_argument("--list", action="store_true", help="show the configurations and end")
    parser.add_argument("--logs", type=Path, help="a folder for the logs of the engines; else they are not kept")
    options = parser.parse_args()
    if strangers := set(options.name) - set(MATRIX):
        parser.error(f"there is no configuration {', '.join(sorted(strangers))}: --list shows them")
    if options.list:
        show_all()
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the engine that runs is ended too
    if not options.json:
        write(*HEAD)
    with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
        logs = options.logs or Path(folder)
        results = [run(name, Path(folder), logs, options) for name in options.name or MATRIX]
    sys.exit(not all(result.is_right for result in results))


def run(name: str, folder: Path, logs: Path, options: argparse.Namespace) -> MatrixResult:
    """Run one configuration; show and write its result when it has ended."""
    one = MATRIX[name]
    model = build(one.model, folder / "models" / one.model)
    result = run_configuration(one, model, logs / name, options.requests)
    if options.json:
        write(json.dumps({**asdict(result), "ok": result.is_right}))
        return result
    write(row_of(one, result))
    write(*(f"    {name}: {fault}" for fault in result.faults[:SHOWN_FAULTS]))
    seconds = ", ".join(f"{kind} {result.start_s[kind]:.0f} + {result.asking_s[kind]:.0f} s" for kind in result.start_s)
    write(f"    {len(result.faults)} faults; start and requests: {seconds}")
    if options.write:  # after each: all of them take an hour
        PAGE.write_text(replace_results(PAGE.read_text(), {name: row_of(one, result)}))
    return result


def show_all() -> None:
    """Print each configuration."""
    for name, one in MATRIX.items():
        variables = " ".join(f"{key}={value}" for key, value in one.environment.items())
        shims = " ".join(f"+{shim.lower()}" for shim in one.shims)
        own = " ".join(filter(None, [variables, shims, "--encoder-planning" if one.encoder_planning else ""]))
        write(f"{name:12} {own} {shlex.join(flags_of(one, Path('SCRATCH'), is_semel=True))}")


def write(*lines: str) -> None:
    """Show lines at once."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
