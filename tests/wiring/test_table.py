"""Every flag has a row in the table, is off its default where the row says, and is seen by a test that there is."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from semel.core.flag import Flag, flags_of
from semel.settings.frontend import FrontendSettings
from semel.settings.serve import ServeSettings
from semel.settings.worker import WorkerSettings
from tests.wiring.lines import LINES
from tests.wiring.processes import ROOT, Flags, Places
from tests.wiring.table import FRONTEND, SERVE, WORKER, Seen

AT = Places(Path("/home"), Path("/model"), *range(10_001, 10_007))
ALL = [(FrontendSettings, FRONTEND), (WorkerSettings, WORKER)]


def flags(kind: type) -> dict[str, Flag]:
    return {flag.name: flag for flag in flags_of(kind) if not flag.is_positional}


@cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def faults(known: Mapping[str, Flag], table: Mapping[str, Seen], lines: Mapping[str, Flags]) -> Iterator[str]:
    """What is wrong with a table."""
    for name in known.keys() ^ table.keys():
        yield f"--{name}: {'no row says how it is seen to act' if name in known else 'there is no such flag'}"
    for name, seen in table.items():
        path, _, test = seen.test.partition("::")
        if test not in names_in(path):
            yield f"--{name}: there is no {seen.test}"
        if not seen.line or name not in known:
            continue
        if name not in lines[seen.line]:
            yield f"--{name}: it is not on the line of the {seen.line}"
        elif not is_other(known[name], lines[seen.line][name]):
            yield f"--{name}: the {seen.line} has its default"


def is_other(flag: Flag, value: object) -> bool:
    return flag.is_required or flag.parse(str(value)) != flag.default


LINES_AT = {name: line(AT) for name, line in LINES.items()}


@pytest.mark.parametrize(("kind", "table"), ALL, ids=["frontend", "worker"])
def test_every_flag_is_seen_to_act_off_its_default(kind: type, table: Mapping[str, Seen]) -> None:
    assert not list(faults(flags(kind), table, LINES_AT))


def test_what_only_serve_has_is_seen_too() -> None:
    own = {name: flag for name, flag in flags(ServeSettings).items() if name not in {**FRONTEND, **WORKER}}
    assert not list(faults(own, SERVE, LINES_AT))


def test_a_flag_without_a_row_or_a_test_or_with_its_default_is_found() -> None:
    """The control."""
    known, row = flags(FrontendSettings), FRONTEND["max-requests"]
    one = {"max-requests": known["max-requests"]}
    assert list(faults(one, {}, LINES_AT)) == ["--max-requests: no row says how it is seen to act"]
    assert "there is no tests/wiring" in next(faults(one, {"max-requests": Seen(row.line, row.test + "s")}, LINES_AT))
    lines = {row.line: {"max-requests": 4_096}}
    assert list(faults(one, {"max-requests": row}, lines)) == ["--max-requests: the served frontend has its default"]
