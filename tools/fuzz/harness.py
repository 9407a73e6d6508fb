"""The process that fuzzes one target: `python -m tools.fuzz.harness NAME [options of libFuzzer] [folders]`.

atheris instruments what is imported under it, so nothing of semel is imported before; what a target imports only when
it runs is imported by a first pass over its seeds.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import warnings
from collections.abc import Callable
from random import Random
from typing import Any, Final

from tools.fuzz.mutation import stretched
from tools.fuzz.target import Run, Target
from tools.fuzz.targets import find

_STRETCHED: Final = 0.05
_STRUCTURED: Final = 0.5


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
    lengths = (f"-max_len={target.max_bytes}", "-len_control=0")  # long ones at once: they show what is slow
    atheris.Setup([sys.argv[0], *lengths, *options], run, custom_mutator=_mutator(target, atheris))
    atheris.Fuzz()


def _warm_up(target: Target, run: Run) -> None:
    for seed in target.seeds().values():
        with contextlib.suppress(Exception):  # a finding among the seeds is reported when the fuzzer runs it
            run(seed)


def _mutator(target: Target, atheris: Any) -> Callable[[bytes, int, int], bytes]:
    """Edits along the structure, where a target knows it; repetitions, which show what is slow; blind edits."""
    along_structure = target.mutate()

    def mutator(data: bytes, max_bytes: int, seed: int) -> bytes:
        random = Random(seed)
        if random.random() < _STRETCHED:
            return stretched(data, random, max_bytes)
        if along_structure is not None and random.random() < _STRUCTURED:
            new = along_structure(data, random)
            if new is not None and len(new) <= max_bytes:
                return new
        blind: bytes = atheris.Mutate(data, max_bytes)  # there is another one under this name once it fuzzes
        return blind

    return mutator


if __name__ == "__main__":
    main(sys.argv[1:])
