"""`semel cells`: the balancer's configuration for several cells, and whether they are as their file says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console

from semel.cli.flags import Call, HelpGroup, command
from semel.core.flag import REQUIRED, flag

__all__ = ["CellsFileSettings", "cells"]

cells = typer.Typer(
    help="Cut a fleet into cells by tenant, behind Envoy or HAProxy.",
    cls=HelpGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
)
console = Console()


@dataclass(frozen=True, slots=True)
class CellsFileSettings:
    """The settings of `semel cells envoy`, `semel cells haproxy` and `semel cells check`."""

    path: Path = flag(
        REQUIRED,
        "file",
        help="The cells file, in TOML: each cell with its frontends.",
        group="Fleet",
        is_positional=True,
    )


@command(cells, CellsFileSettings)
def envoy(call: Call[CellsFileSettings]) -> None:
    """Print Envoy's configuration for the cells of a file, as JSON."""
    from semel.cells.envoy import envoy_config
    from semel.cells.file import read_cells

    typer.echo(envoy_config(read_cells(call.settings.path)), nl=False)


@command(cells, CellsFileSettings)
def haproxy(call: Call[CellsFileSettings]) -> None:
    """Print HAProxy's configuration for the cells of a file."""
    from semel.cells.file import read_cells
    from semel.cells.haproxy import haproxy_config

    typer.echo(haproxy_config(read_cells(call.settings.path)), nl=False)


@command(cells, CellsFileSettings)
def check(call: Call[CellsFileSettings]) -> None:
    """Check a cells file, and ask all frontends whether they are ready and serve alike. Exits with 1 if not."""
    from semel.cells.check import ask_all, findings
    from semel.cells.file import read_cells

    file = read_cells(call.settings.path)
    failed = False
    for found in findings(file, ask_all(file)):
        failed |= found.is_problem
        mark = "[red]problem[/]" if found.is_problem else "[green]ok     [/]"
        remedy = f"  → {found.remedy}" if found.remedy else ""
        console.print(mark, end=" ")
        console.print(f"{found.cell}: {found.text}{remedy}", highlight=False, soft_wrap=True, markup=False)
    raise typer.Exit(int(failed))
