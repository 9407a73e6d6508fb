"""What a fuzz target is. Neither a fuzzer nor anything of semel is imported here: a harness instruments first.

A target's module has `run(data)`, which returns for every input but a finding, and `seeds()`, the inputs that its
corpus begins with. It may have `mutate(data, random)`, which edits an input along its structure, or gives None for one
that has none.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

__all__ = ["CORPUS", "Mutate", "Run", "Target"]

CORPUS: Final = Path(__file__).parent / "corpus"
"""One folder per target; what was found and has been fixed is in its `findings`."""

Run = Callable[[bytes], None]
Mutate = Callable[[bytes, Random], bytes | None]


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

    @property
    def corpus(self) -> Path:
        """Its folder in the repository."""
        return CORPUS / self.name

    def inputs(self) -> list[Path]:
        """Every input that the repository has for it, fixed findings too."""
        return sorted(path for path in self.corpus.rglob("*") if path.is_file())

    def run(self) -> Run:
        """What is called with every input."""
        loaded: Run = getattr(self._load(), self.function)
        return loaded

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
