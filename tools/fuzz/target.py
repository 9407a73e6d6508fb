"""What a fuzz target is. Neither a fuzzer nor anything of semel is imported here: a harness instruments first.

A target's module has `run(data)`, which returns for every input but a finding, and `seeds()`, the inputs that its
corpus begins with. It may have `mutate(data, random)`, which edits an input along its structure, or gives None for one
that has none. An input that takes more CPU time than its bytes allow is a finding too.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

CORPUS: Final = Path(__file__).parents[2] / "tests/fuzz/corpus"
"""One folder per target; what was found and has been fixed is in its `findings`."""

Run = Callable[[bytes], None]
Mutate = Callable[[bytes, Random], bytes | None]


_REPEATS: Final = 2
"""Who was interrupted once is not slow."""


class TooSlow(AssertionError):
    """An input takes more CPU time than its size allows."""


@dataclass(frozen=True, slots=True)
class Target:
    """One entry of the table."""

    name: str
    module: str
    about: str
    instrumented: tuple[str, ...]
    """The packages and modules whose branches guide the fuzzer."""

    max_bytes: int = 4_096
    """The longest input."""

    function: str = "run"

    base_ms: float = 20.0
    us_per_byte: float = 25.0
    """CPU time that an input may take: some, and some for each of its bytes. About ten times what it takes."""

    corpus_of: str = ""
    """The target whose corpus it has; empty for its own."""

    starts_processes: bool = False
    """Whether its first input takes seconds, and one that ends a process too."""

    @property
    def corpus(self) -> Path:
        """Its folder in the repository."""
        return CORPUS / (self.corpus_of or self.name)

    def inputs(self) -> list[Path]:
        """Every input that the repository has for it, fixed findings too."""
        return sorted(path for path in self.corpus.rglob("*") if path.is_file())

    def run(self) -> Run:
        """What is called with every input."""
        loaded: Run = getattr(self._load(), self.function)
        return timed(loaded, self.allowed_s)

    def allowed_s(self, nbytes: int) -> float:
        """The CPU time that an input of this size may take."""
        return self.base_ms / 1e3 + self.us_per_byte / 1e6 * nbytes

    def mutate(self) -> Mutate | None:
        """What edits inputs along their structure, if there is such a thing."""
        loaded: Mutate | None = getattr(self._load(), "mutate", None)
        return loaded

    def seeds(self) -> Mapping[str, bytes]:
        """What the corpus begins with, by names for its files."""
        seeds: Mapping[str, bytes] = self._load().seeds()
        return seeds

    def _load(self) -> Any:
        return importlib.import_module(self.module)


def timed(run: Run, allowed_s: Callable[[int], float]) -> Run:
    """The same, and an input that takes too much CPU time, three times in a row, is a finding."""

    def run_timed(data: bytes) -> None:
        allowed = allowed_s(len(data))
        took = _cpu_s(run, data)
        for _ in range(_REPEATS):
            if took <= allowed:
                return
            took = min(took, _cpu_s(run, data))
        if took > allowed:
            raise TooSlow(f"{took:.3f} s of CPU time for {len(data):,} bytes, {allowed:.3f} s are allowed")

    return run_timed


def _cpu_s(run: Run, data: bytes) -> float:
    began = time.process_time()
    run(data)
    return time.process_time() - began
