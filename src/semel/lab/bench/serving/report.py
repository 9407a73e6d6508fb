"""The results of a run of `semel bench serve`: as a table, or as one JSON object."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from semel.lab.bench.serving.figures import Row, checks_of
from semel.lab.bench.serving.statistics import Figure

__all__ = ["ServeReport", "format_figure"]

_LEGEND: Final = "In brackets: 95% interval; ?: the limit lies within it. Both sides took turns."
_SHORT: Final = (
    ("what the image adds", "image adds"),
    ("what the eviction adds", "eviction adds"),
    ("what the restart adds", "restart adds"),
    ("CPU time of all processes", "CPU time"),
    ("serving CPU that the image adds", "image adds, serving CPU"),
    ("next to the engine in process", "engine in process"),
)
"""What a table says in fewer words than the name of a row, so that it fits 80 columns."""


@dataclass(frozen=True, slots=True)
class ServeReport:
    """The rows of all scenarios, and the conditions of the run."""

    machine: dict[str, str | int | float]
    run: dict[str, object]
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """Return whether every limit is met."""
        return all(check.ok for check in checks_of(self.rows))

    def to_json(self) -> str:
        """Return one line of JSON: `checks` as in every benchmark, `rows` with all figures and their errors."""
        versions = {"semel": version("semel")}
        report = {
            "bench": "serve",
            "machine": self.machine | versions,
            "run": self.run,
            "checks": [asdict(check) for check in checks_of(self.rows)],
            "rows": [_as_json(row) for row in self.rows],
        }
        return json.dumps(_finite(report), allow_nan=False)

    def print_table(self, console: Console, *, has_stages: bool = False) -> None:
        """A table for each scenario, with semel's time by stage or without."""
        rows = [row for row in self.rows if has_stages or not row.is_stage]
        for scenario in dict.fromkeys(row.scenario for row in rows):
            console.print(_table(scenario, [row for row in rows if row.scenario == scenario]))
        console.print(_LEGEND, style="dim", highlight=False, markup=False)
        facts = self.machine | self.run
        console.print(" · ".join(f"{name} {value}" for name, value in facts.items()), style="dim", highlight=False)


def _table(scenario: str, rows: list[Row]) -> Table:
    table = Table(title=f"semel bench serve: {scenario}", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    headings = ["semel", "other" if scenario == "sources" else "vLLM", "ratio", "limit", ""]
    headings += ["door", "vLLM", "ratio", "limit", ""] if any(row.door or row.is_door for row in rows) else []
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for row in rows:
        mine, door = (None, row) if row.is_door else (row, row.door)
        table.add_row(_title(row), *_cells(mine), *(_cells(door) if door else ()))
    return table


def _cells(row: Row | None) -> list[str]:
    if row is None:
        return [""] * 5
    # The interval that counts is that of the ratio.
    figures = [row.semel, row.vllm]
    sides = map(format_figure, figures) if row.ratio is None else map(_value, figures)
    return [*sides, format_figure(row.ratio), _limit(row), _verdict(row)]


def _title(row: Row) -> str:
    title = row.name.partition(": ")[2]
    for words, short in _SHORT:
        title = title.replace(words, short)
    return f"{title}, {row.unit}" if row.unit else title


def _verdict(row: Row) -> str:
    if row.ok is None:
        return ""
    mark = "" if row.is_sure else "?"
    return f"[green]kept{mark}[/]" if row.ok else f"[red]missed{mark}[/]"


def _limit(row: Row) -> str:
    if row.limit is None:
        return ""
    sign = "≤" if row.limit.kind == "at most" else "≥"
    return f"{sign} {row.limit.value:,g}{'×' if row.limit.of == 'ratio' else ''}"


def format_figure(figure: Figure | None) -> str:
    """Return a figure with its interval, if it has one."""
    if figure is None:
        return ""
    if figure.low == figure.high:
        return _number(figure.value)
    return f"{_number(figure.value)} [{_number(figure.low)}, {_number(figure.high)}]"


def _value(figure: Figure | None) -> str:
    return "" if figure is None else _number(figure.value)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"


def _finite(value: Any) -> Any:
    """Return the same value without infinities, which JSON does not have: a ratio to nothing becomes null."""
    if isinstance(value, dict):
        return {name: _finite(member) for name, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(member) for member in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _as_json(row: Row) -> dict[str, Any]:
    limit = None if row.limit is None else asdict(row.limit)
    fields = asdict(replace(row, door=None)) | {"door": None if row.door is None else _as_json(row.door)}
    del fields["is_promised"]
    return fields | {"scenario": row.scenario, "limit": limit, "ok": row.ok, "sure": row.is_sure}
