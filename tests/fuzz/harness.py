"""The process that fuzzes one target: `python -m tests.fuzz.harness NAME [options of libFuzzer] [folders]`.

atheris instruments what is imported under it, so nothing of semel is imported before; what a target imports only when
it runs is imported by a first pass over its seeds.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import warnings
from random import Random
from typing import Any

from tests.fuzz.target import Run, Target
from tests.fuzz.targets import find

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    """Fuzz until an option of libFuzzer ends it; a finding ends the process with a code that is not 0."""
    name, *options = arguments
    atheris: Any = importlib.import_module("atheris")
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    target = find(name)
    with atheris.instrument_imports(include=[*target.instrumented], enable_loader_override=False):
        run = target.run()
        _warm_up(target, run)
    mutators = _mutators(target, atheris)
    atheris.Setup([sys.argv[0], f"-max_len={target.max_bytes}", *options], run, **mutators)
    atheris.Fuzz()


def _warm_up(target: Target, run: Run) -> None:
    for seed in target.seeds().values():
        with contextlib.suppress(Exception):  # a finding among the seeds is reported when the fuzzer runs it
            run(seed)


def _mutators(target: Target, atheris: Any) -> dict[str, Any]:
    if (along_structure := target.mutate()) is None:
        return {}

    def mutator(data: bytes, max_bytes: int, seed: int) -> bytes:
        random = Random(seed)
        if random.random() < 0.5 and (new := along_structure(data, random)) is not None and len(new) <= max_bytes:
            return new
        blind: bytes = atheris.Mutate(data, max_bytes)
        return blind

    return {"custom_mutator": mutator}


if __name__ == "__main__":
    main(sys.argv[1:])
