"""The table of mutants fits the source and names tests that there are; `scripts/mutants` puts them in."""

from __future__ import annotations

import ast
import shutil
from functools import cache
from pathlib import Path

import pytest

from tools.mutants import MUTANTS, ROOT, Mutant, apply


@cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def copied(mutants: list[Mutant], home: Path) -> Path:
    for file in {one.file for one in mutants}:
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "src" / "semel" / file, home / file)
    return home


def test_every_mutant_fits_the_source_and_names_a_test(tmp_path: Path) -> None:
    source = copied(list(MUTANTS), tmp_path)
    apply(MUTANTS, source)
    for file in {one.file for one in MUTANTS}:
        compile((source / file).read_text(), file, "exec")
    for one in MUTANTS:
        assert one.test.partition("::")[2] in names_in(one.test_file), one


def test_a_mutant_that_fits_nothing_is_found(tmp_path: Path) -> None:
    gone = Mutant("gone", "compose/frontend.py", "no such text", "", "")
    with pytest.raises(ValueError, match="0 times, not once: no such text"):
        apply([gone], copied([gone], tmp_path))
