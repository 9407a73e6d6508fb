"""`semel bench`: measured comparisons with bare vLLM, both sides in one run."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import typer
from rich.console import Console

from semel.cli.flags import Call, HelpGroup, command
from semel.lab.bench.settings import (
    BatchBenchSettings,
    CompareSettings,
    FleetSettings,
    ReportSettings,
    StreamsSettings,
)

if TYPE_CHECKING:
    from semel.lab.bench.report import Report

__all__ = ["bench"]

bench = typer.Typer(
    help="Measured comparisons with bare vLLM, both sides in one run.",
    cls=HelpGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
)

console = Console()


@command(bench, CompareSettings, "serve", engine_flags=True)
def bench_serve(call: Call[CompareSettings]) -> None:
    """Compare bare vLLM's server with semel's: one client asks both in turns. It takes minutes."""
    from semel.lab.bench.serving.run import Options
    from semel.lab.cli.benching import bench_serving

    settings = call.settings
    report = bench_serving(
        Options(
            settings.model,
            tuple(call.rest),
            settings.baseline,
            settings.semel,
            settings.api_key,
            settings.only,
            settings.quick,
            settings.transport,
            settings.semel_source,
            (os.environ.get("SEMEL") or "1") if settings.door else "",
        )
    )
    if settings.as_json:
        typer.echo(report.to_json())
    else:
        report.print_table(console, has_stages=settings.stages)
    if settings.plot is not None:
        from semel.lab.bench.serving.plots import draw

        draw(report, settings.plot)
    raise typer.Exit(int(settings.check and not report.ok))


@command(bench, ReportSettings)
def processing(call: Call[ReportSettings]) -> None:
    """Render chats with new and with known images, next to vLLM's renderer. Exits with 1 if a check fails."""
    from semel.lab.bench.processing import run

    _report(run, call.settings)


@command(bench, ReportSettings)
def encoder(call: Call[ReportSettings]) -> None:
    """Measure what semel's encoder plug-ins gain over vLLM's own classes. Needs vLLM. Exits with 1 if a check fails."""
    from semel.lab.bench.encoder import run

    _report(run, call.settings)


@command(bench, ReportSettings)
def cache(call: Call[ReportSettings]) -> None:
    """Hand features to other processes, next to one memcpy and vLLM's ring. Exits with 1 if a check fails."""
    from semel.lab.bench.cache import run

    _report(run, call.settings)


@command(bench, StreamsSettings)
def streams(call: Call[StreamsSettings]) -> None:
    """Open many streams on one frontend: lag of its event loop, memory per stream. Exits with 1 if a check fails."""
    from rich.progress import Progress

    from semel.lab.bench.streams import run

    settings = call.settings
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("starting", total=1.0)
        tell = lambda done, what: progress.update(bar, completed=done, description=what)  # noqa: E731
        report = run(options=settings.load, quick=settings.report.quick, tell=tell)
    _show(report, settings.report)


@command(bench, FleetSettings)
def fleet(call: Call[FleetSettings]) -> None:
    """Measure what a thousand workers cost a frontend, and frontends a worker. Exits with 1 if a check fails."""
    from semel.lab.bench.fleet import run

    settings = call.settings
    with Console(stderr=True).status("measuring") as status:
        report = run(options=settings.size, quick=settings.report.quick, tell=status.update)
    _show(report, settings.report)


@command(bench, BatchBenchSettings)
def batch(call: Call[BatchBenchSettings]) -> None:
    """Kill `semel batch` and let it go on; its rate next to requests by hand and `vllm run-batch`. Needs vLLM."""
    import uvloop

    from semel.lab.bench.batch import run
    from semel.lab.cli.benching import shown_progress, until_stopped

    settings = call.settings
    with shown_progress("semel bench batch") as tell:
        report = uvloop.run(until_stopped(run(settings.size, tell, quick=settings.report.quick)))
    _show(report, settings.report)


def _report(run: Callable[..., Report], settings: ReportSettings) -> NoReturn:
    # vLLM logs to whatever standard output is when it is imported; ours is for the report alone.
    with Console(stderr=True).status("measuring"), contextlib.redirect_stdout(sys.stderr):
        report = run(quick=settings.quick)
    _show(report, settings)


def _show(report: Report, settings: ReportSettings) -> NoReturn:
    if settings.as_json:
        typer.echo(report.to_json())
    else:
        report.print_table(console)
    if settings.plot is not None:
        report.plot(settings.plot)
    raise typer.Exit(int(not report.ok))
