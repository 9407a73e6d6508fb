"""Every tiny model on an engine as `semel worker` starts it: bare vLLM's answers and semel's, tokens and logprobs.

    scripts/families                     # every family that runs on a CPU, one engine after the other
    scripts/families qwen3-vl mistral3   # these
    scripts/families --write             # and write the tables of docs/get-started/models.md
    scripts/families --door              # plain vLLM with and without SEMEL=1 instead (tools.engine.door_families)

Each family is written to a temporary folder and served in a process of its own, with a deadline. Fails if an answer of
semel's is not bare vLLM's, if an item with other values is answered like the right one, if a feature that lies does
anything to another request, or if an image of a random size is answered with an error of the server.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from semel.lab.testing.models import FAMILIES, build
from semel.processing import read_config
from tools.engine.children import NoResult, json_of
from tools.engine.door_families import HEAD as DOOR_HEAD
from tools.engine.door_families import compare_family
from tools.engine.family_parity import Parity
from tools.engine.layouts import layouts_of
from tools.engine.models_page import HEAD, PAGE, replace_rows, replace_section, row_of, write_for_doctor
from tools.engine.registry import architectures, table

DEADLINE_S: Final = 600
NO_ENGINE: Final = "not compared: no engine of it runs on a CPU"


def main() -> None:
    """Ask the families of the command line, and show a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="*", help=f"all by default: {', '.join(runnable())}")
    parser.add_argument(
        "--write", action="store_true", help="write the rows of these families into docs/get-started/models.md"
    )
    parser.add_argument("--door", action="store_true", help="compare plain vLLM with and without SEMEL=1")
    options = parser.parse_args()
    chosen = options.family or runnable()
    if strangers := set(chosen) - set(runnable()):
        parser.error(f"no engine runs {', '.join(sorted(strangers))} here")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the engine that runs is ended too
    for line in (DOOR_HEAD,) if options.door else HEAD:
        write(line)
    with tempfile.TemporaryDirectory(prefix="families-") as folder:
        if options.door:
            shown = [show_door(family, Path(folder)) for family in chosen]
            sys.exit(not all(shown))
        results = [show(family, Path(folder), is_written=options.write) for family in chosen]
    if options.write:
        write_rest()
    sys.exit(not all(results))


def write_rest() -> None:
    """Write what needs no engine: families that have none here, and what follows from vLLM's classes."""
    page = PAGE.read_text()
    with tempfile.TemporaryDirectory(prefix="families-") as folder:
        configs = {family: read_config(build(family, Path(folder) / family)) for family in FAMILIES}
        idle = {
            family: row_of(family, configs[family], NO_ENGINE, layouts_of(family, Path(folder) / family))
            for family in FAMILIES
            if family not in runnable()
        }
    served = {name for config in configs.values() for name in config.get("architectures") or ()}
    others = [(name, kind) for name, kind in architectures() if name not in served]
    PAGE.write_text(replace_section(replace_rows(page, idle), "registry", table(others)))
    write_for_doctor(PAGE.read_text())


def show(family: str, folder: Path, *, is_written: bool) -> bool:
    """Show the row of a family, and write it into the page; whether all is right."""
    began = time.monotonic()
    model = build(family, folder / family)
    found = ask(family, model)
    row = row_of(family, read_config(model), found, layouts_of(family, model))
    write(row)
    faults = [found] if isinstance(found, str) else found.faults
    for fault in faults:
        write(f"    {family}: {fault}")
    write(f"    {time.monotonic() - began:.0f} s")
    if is_written:  # after each: a run takes half an hour
        PAGE.write_text(replace_rows(PAGE.read_text(), {family: row}))
    return isinstance(found, Parity) and found.is_right


def show_door(family: str, folder: Path) -> bool:
    """Show what plain vLLM answers with and without the door; whether that is the same."""
    began = time.monotonic()
    try:
        row, faults = compare_family(family, build(family, folder / family))
    except NoResult as error:
        row, faults = f"| {family} | | | | | | |", [str(error)]
    for line in (row, *(f"    {family}: {fault}" for fault in faults), f"    {time.monotonic() - began:.0f} s"):
        write(line)
    return not faults


def write(line: str) -> None:
    """Show a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def runnable() -> list[str]:
    """Return the families that have an engine on a CPU."""
    return [name for name, model in FAMILIES.items() if model.serving.level == "engine"]


def ask(family: str, folder: Path) -> Parity | str:
    """What was found of a family, or why nothing was."""
    module, log = "tools.engine.family_parity", folder.with_suffix(".log")
    try:
        return Parity(**json.loads(json_of(module, [family, str(folder)], log=log, deadline_s=DEADLINE_S)))
    except NoResult as error:
        return str(error)


if __name__ == "__main__":
    main()
