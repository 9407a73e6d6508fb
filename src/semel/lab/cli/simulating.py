"""`semel simulate`: a fleet that is not there, under a workload."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import typer
from rich.console import Console

from semel.cli.flags import Call
from semel.core.flag import flag
from semel.errors import ConfigError

if TYPE_CHECKING:
    from semel.lab.simulate.costs import Costs
    from semel.lab.simulate.faults import Fault
    from semel.lab.simulate.figures import Figures

__all__ = ["SimulateSettings", "simulate"]

_CACHE_BYTES: Final = 1 << 30
_FAULTS: Final = "crash, broken, slow, join; with --level whole also drain, frontendcrash, partition, blip"


@dataclass(frozen=True, slots=True)
class SimulateSettings:
    """The options of `semel simulate`."""

    level: Literal["decisions", "whole"] = flag(
        "decisions",
        help="What runs: the decisions, up to 1,000 frontends and workers, or the whole code, up to about 30.",
        group="Measurement",
    )
    frontends: int = flag(4, help="Number of frontends.", group="Measurement", min=1, max=10_000)
    workers: int = flag(4, help="Number of workers.", group="Measurement", min=1, max=10_000)
    processes: int = flag(
        4, "preprocessing-processes", help="Preprocessing processes of each frontend.", group="Measurement", min=1
    )
    cells: int = flag(1, help="Number of cells that the fleet is cut into.", group="Measurement", min=1)
    cells_by: Literal["tenant", "conversation"] = flag(
        "tenant", help="What decides on the cell of a request.", group="Measurement"
    )
    workload: str = flag(
        "conversations",
        help="What is asked: catalogue, conversations, agents, documents, viral or diurnal; a .json file with the "
        "settings of one of these; or a .jsonl file with a trace of requests.",
        group="Measurement",
    )
    rate: float = flag(10.0, help="Requests per second.", group="Measurement", min=0.001)
    seconds: float = flag(
        60.0, help="How long requests come, in simulated seconds.", group="Measurement", unit="seconds", min=0.1
    )
    seed: int = flag(1, help="The same seed gives the same figures.", group="Measurement", min=0)
    fault: tuple[str, ...] = flag(
        (),
        help=f"What happens: a kind and its values, as join:at_s=5. Kinds: {_FAULTS}.",
        group="Measurement",
    )
    announce_interval_s: float | None = flag(
        None,
        "announce-interval-s",
        help="Seconds between two reports of a worker to all frontends, with --level decisions.",
        group="Measurement",
        unit="seconds",
        min=0.001,
        default_text="0.25 s; 0.02 s with up to 4 frontends",
    )
    eject_after: int = flag(
        3,
        "eject-after-failures",
        help="Failures in a row after which a worker is ejected; 0 for never.",
        group="Measurement",
        min=0,
    )
    costs: Path | None = flag(
        None,
        help="Report of `semel bench serve --json` from which costs are read.",
        group="Measurement",
        default_text="guesses",
    )
    against: Path | None = flag(
        None,
        help="Run that `scripts/load --record` wrote: simulate it, print both, exit with 1 if they differ too much.",
        group="Measurement",
    )
    fit: Path | None = flag(
        None, help="Another such run, of which the cost of a step is fitted for --against.", group="Measurement"
    )
    compare: bool = flag(
        False, help="Simulate frontends that ask workers in turn as well (--level decisions).", group="Measurement"
    )
    record: Path | None = flag(
        None, help="Write the requests as a trace to this .jsonl file, and exit.", group="Output"
    )
    as_json: bool = flag(False, "json", help="Print one JSON object instead of a table.", group="Output")
    plot: Path | None = flag(None, help="Draw the figures into this folder.", group="Output")


def simulate(call: Call[SimulateSettings]) -> None:
    """Simulate a fleet with this version's own code under a virtual clock: what it does, not how fast a GPU is."""
    from semel.lab.simulate.costs import MODELLED, Costs

    settings, console = call.settings, Console()
    costs = MODELLED if settings.costs is None else Costs.of_bench(settings.costs)
    if settings.record is not None:
        _record(settings, settings.record, console)
    elif settings.against is not None:
        raise typer.Exit(int(not _against(settings, settings.against, costs, console)))
    else:
        _show(settings, _runs(settings, costs), console)


def _runs(settings: SimulateSettings, costs: Costs) -> dict[str, Figures]:
    """Return the figures by who chose; the first are semel's."""
    if settings.level == "whole":
        return {"semel": _whole(settings, costs)}
    runs = {"semel": _decisions(settings, costs, is_round_robin=False)}
    if settings.compare:
        runs["round robin"] = _decisions(settings, costs, is_round_robin=True)
    return runs


def _decisions(settings: SimulateSettings, costs: Costs, *, is_round_robin: bool) -> Figures:
    from semel.lab.simulate.decisions import Decisions, Sizes
    from semel.lab.simulate.figures import Figures
    from semel.lab.simulate.members import CellWorkload, sizes_of_cells
    from semel.lab.simulate.traces import load_workload

    faults = [_fault(text) for text in settings.fault]
    if settings.cells > min(settings.frontends, settings.workers):
        raise ConfigError(f"--cells {settings.cells}: every cell needs a frontend and a worker")
    if faults and settings.cells > 1:
        raise ConfigError("--fault names workers of one fleet: leave out --cells")
    workload = load_workload(settings.workload, rate=settings.rate, seconds=settings.seconds)
    whole = Sizes(
        settings.frontends,
        settings.workers,
        processes=settings.processes,
        announce_interval_s=settings.announce_interval_s,
        eject_after=settings.eject_after,
    )
    figures = Figures()
    with _progress(settings) as tell:
        for cell, sizes in enumerate(sizes_of_cells(whole, settings.cells)):
            part = CellWorkload(workload, cell, settings.cells, settings.cells_by) if settings.cells > 1 else workload
            run = Decisions(
                sizes,
                part,
                seed=settings.seed,
                costs=costs,
                faults=faults,
                is_round_robin=is_round_robin,
                figures=figures,
            )
            run.run(partial(tell, cell))
    return figures


def _whole(settings: SimulateSettings, costs: Costs) -> Figures:
    try:
        from semel.lab.simulate import whole
        from semel.lab.simulate.processes import FleetSize
    except ImportError as error:
        raise ConfigError(f"--level whole is not there: {error}") from error
    from semel.lab.simulate.traces import load_workload

    if settings.cells > 1 or settings.compare:
        raise ConfigError("--cells and --compare are for --level decisions")
    workload = load_workload(settings.workload, rate=settings.rate, seconds=settings.seconds)
    size = FleetSize(settings.frontends, settings.workers, pool_processes=settings.processes, cache_bytes=_CACHE_BYTES)
    faults = [_fault(text) for text in settings.fault]
    with Console(stderr=True).status("simulating"):
        return whole.run(whole.Plan(workload, size, costs, faults, settings.seed))


def _fault(text: str) -> Fault:
    """Return a fault as it is written: `broken:worker=3,at_s=5,for_s=20`."""
    from semel.lab.simulate import faults

    kind, _, rest = text.partition(":")
    made = {name.lower(): getattr(faults, name) for name in faults.__all__ if name[0].isupper() and name != "Fault"}
    if kind not in made:
        raise ConfigError(f"--fault {text}: no kind {kind!r}; there are {', '.join(sorted(made))}")
    known = {one.name for one in fields(made[kind])}
    values: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        name, _, value = pair.partition("=")
        if name not in known:
            raise ConfigError(f"--fault {text}: {kind} has no {name!r}; it has {', '.join(sorted(known))}")
        try:
            values[name] = _value(name, value)
        except ValueError:
            raise ConfigError(f"--fault {text}: {value!r} is no value for {name}") from None
    try:
        fault: Fault = made[kind](**values)
    except TypeError:
        missing = ", ".join(sorted(known - set(values)))
        raise ConfigError(f"--fault {text}: give {missing}") from None
    return fault


def _value(name: str, value: str) -> Any:
    if name == "frontends":
        return tuple(int(one) for one in value.split("+"))
    return int(value) if name in ("worker", "frontend") else float(value)


@contextmanager
def _progress(settings: SimulateSettings) -> Iterator[Callable[[int, float], None]]:
    """A bar on standard error, if that is a terminal."""
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("simulating", total=settings.seconds * settings.cells)

        def tell(cell: int, now: float) -> None:
            progress.update(bar, completed=cell * settings.seconds + min(now, settings.seconds))

        yield tell


def _show(settings: SimulateSettings, runs: dict[str, Figures], console: Console) -> None:
    figures, *others = runs.values()
    if settings.as_json:
        run = {
            name: getattr(settings, name)
            for name in ("level", "frontends", "workers", "processes", "cells", "workload", "rate", "seconds", "seed")
        }
        report = {"simulate": run, "figures": {name: one.json() for name, one in runs.items()}}
        typer.echo(json.dumps(report, sort_keys=True))
    else:
        title = f"semel simulate: {settings.frontends:,} × {settings.workers:,}, {settings.workload}"
        figures.print_table(console, title, others[0] if others else None, "in turn")
    if settings.plot is not None:
        from semel.lab.simulate.plots import draw

        draw(runs, settings.plot)


def _record(settings: SimulateSettings, path: Path, console: Console) -> None:
    from random import Random

    from semel.lab.simulate.traces import load_workload, write_trace

    workload = load_workload(settings.workload, rate=settings.rate, seconds=settings.seconds)
    number = write_trace(path, workload.asks(Random(f"{settings.seed}/asks")))
    console.print(f"{number:,} requests in {path}", highlight=False)


def _against(settings: SimulateSettings, path: Path, costs: Costs, console: Console) -> bool:
    try:
        from semel.lab.simulate import check
    except ImportError as error:
        raise ConfigError(f"--against is not there: {error}") from error

    recorded = check.read_run(path)
    with Console(stderr=True).status("simulating"):
        if settings.fit is not None:
            costs = check.fit(check.read_run(settings.fit), costs, settings.seed)
        found = check.compare(recorded, check.predict(recorded, costs, settings.seed))
    return check.print_comparison(console, found)
