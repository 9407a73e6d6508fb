"""`python -m tools.fleet.noting FILE semel frontend …`: the `semel` command with a frontend that notes each of its
preprocessings in a file; with `round_robin` instead of `semel`, the command of that module.

Nothing else differs. The clock is that of the machine, so that notes of several frontends can be compared.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Final
from unittest.mock import patch

from semel import cli
from semel.core import Digest, Feature
from semel.fleet.fleet import Fleet
from semel.lab.simulate.repeats import Preprocessing
from semel.render import ParsedRequest, Pipeline
from tools.fleet import round_robin

__all__ = ["notes_of", "noting"]

_COMMANDS: Final = {"semel": cli.main, "round_robin": round_robin.main}


def noting(file: Path, choice: str) -> tuple[str, ...]:
    """Return the command of a frontend that chooses workers so and notes its preprocessings."""
    return (sys.executable, "-m", "tools.fleet.noting", str(file), choice)


def notes_of(file: Path) -> list[Preprocessing]:
    """Return the notes in a file; none if there is none."""
    return [Preprocessing(*json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def main() -> None:
    file, choice = Path(sys.argv.pop(1)), sys.argv.pop(1)
    begin, make = Fleet.__init__, Pipeline._make
    fleets: list[Fleet] = []

    def remember(self: Fleet, *words: object, **names: object) -> None:
        begin(self, *words, **names)  # type: ignore[arg-type]
        fleets.append(self)

    async def note(self: Pipeline, request: ParsedRequest, digest: Digest) -> Feature:
        is_made = digest not in self.cache and digest not in self.flight._flown
        began, is_announced = time.monotonic(), any(fleet.holding(digest) is not None for fleet in fleets)
        feature = await make(self, request, digest)
        if is_made:
            one = Preprocessing(digest.hex(), file.name, began, time.monotonic(), is_announced)
            notes.write(f"{json.dumps(one)}\n")
        return feature

    patches = patch.object(Fleet, "__init__", remember), patch.object(Pipeline, "_make", note)
    with file.open("a", buffering=1) as notes, patches[0], patches[1]:
        _COMMANDS[choice]()


if __name__ == "__main__":
    main()
