"""`semel bench`: measured comparisons with bare vLLM, both sides in one run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from semel.cli.options import FLAGS

if TYPE_CHECKING:
    from semel.bench.report import Report

__all__ = ["bench"]

bench = typer.Typer(help="Measured comparisons with bare vLLM, both sides in one run.", no_args_is_help=True)

console = Console()

_Quick = Annotated[bool, typer.Option("--quick", help="End within a minute; figures are rougher.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
_Plot = Annotated[Path | None, typer.Option(help="Draw the figures to this PNG file.")]


@bench.command()
def encoder(quick: _Quick = False, as_json: _Json = False, plot: _Plot = None) -> None:
    """What the encoder's plug-ins gain over vLLM's own classes. Needs vLLM; exit code 1 if a check is not ok."""
    from semel.bench.encoder import run

    _report(run, quick=quick, as_json=as_json, plot=plot)


@bench.command()
def cache(quick: _Quick = False, as_json: _Json = False, plot: _Plot = None) -> None:
    """Handing features to other processes, beside one memcpy and vLLM's ring. Exit code 1 if a check is not ok."""
    from semel.bench.cache import run

    _report(run, quick=quick, as_json=as_json, plot=plot)


@bench.command()
def processing(quick: _Quick = False, as_json: _Json = False, plot: _Plot = None) -> None:
    """Rendering chats with new images and with known ones, beside vLLM's renderer. Exit code 1 if a check is not ok."""
    from semel.bench.processing import run

    _report(run, quick=quick, as_json=as_json, plot=plot)


@bench.command()
def streams(
    streams: Annotated[int, typer.Option(min=1, help="Streams that are open at the same time.")] = 2_000,
    rate: Annotated[float, typer.Option(min=0.1, help="Tokens a second of each.")] = 5.0,
    seconds: Annotated[float, typer.Option(min=1, help="How long all of them are open.")] = 20.0,
    phases: Annotated[int, typer.Option(min=1, help="Groups of streams that get their tokens in turn.")] = 1,
    quick: _Quick = False,
    as_json: _Json = False,
    plot: _Plot = None,
) -> None:
    """Many open streams on one frontend: its event loop's lag, memory for a stream. Exit code 1 if a check fails."""
    from rich.progress import Progress

    from semel.bench.streams import StreamsOptions, run

    options = StreamsOptions(streams, rate, seconds, phases)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("starting", total=1.0)
        tell = lambda done, what: progress.update(bar, completed=done, description=what)  # noqa: E731
        report = run(options=options, quick=quick, tell=tell)
    _show(report, as_json=as_json, plot=plot)


@bench.command("serve", context_settings=FLAGS)
def bench_serve(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="A model folder or name, for both sides; a tiny one is made unless given.")
    ] = None,
    baseline: Annotated[str | None, typer.Option(help="Where bare vLLM serves already; with --semel.")] = None,
    semel: Annotated[str | None, typer.Option(help="Where semel serves already; with --baseline.")] = None,
    api_key: Annotated[str | None, typer.Option(help="A key that these two take.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="A scenario to run; may be given several times. All, unless given.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer turns: sooner, and rougher figures.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit code 1 if a limit is not kept.")] = False,
    as_json: _Json = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the figures into this folder.")] = None,
) -> None:
    """Bare vLLM's server and semel's side by side, asked by one client in turns. Takes every engine flag of vLLM."""
    from semel.bench.serving.run import Options
    from semel.cli.benching import bench_serving

    report = bench_serving(Options(model, tuple(context.args), baseline, semel, api_key, tuple(only or ()), quick))
    if as_json:
        typer.echo(report.to_json())
    else:
        report.print_table(console)
    if plot is not None:
        from semel.bench.serving.plots import draw

        draw(report, plot)
    raise typer.Exit(int(check and not report.ok))


def _report(run: Callable[..., Report], *, quick: bool, as_json: bool, plot: Path | None) -> NoReturn:
    # vLLM logs to whatever standard output is when it is imported; ours is for the report alone.
    with Console(stderr=True).status("measuring"), contextlib.redirect_stdout(sys.stderr):
        report = run(quick=quick)
    _show(report, as_json=as_json, plot=plot)


def _show(report: Report, *, as_json: bool, plot: Path | None) -> NoReturn:
    if as_json:
        typer.echo(report.to_json())
    else:
        report.print_table(console)
    if plot is not None:
        report.plot(plot)
    raise typer.Exit(int(not report.ok))
