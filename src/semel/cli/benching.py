"""`semel bench serve` at a terminal: a progress bar on standard error, or lines where there is no terminal.

Ctrl-C and SIGTERM end the servers that it started before it ends itself.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from semel.bench.serving.bench import Tell
from semel.bench.serving.report import ServeReport
from semel.bench.serving.run import Options, run

__all__ = ["bench_serving"]


def bench_serving(options: Options) -> ServeReport:
    """Run it, and show how far it is."""
    console = Console(stderr=True)
    with (_bar if console.is_terminal else _lines)(console) as tell:
        return uvloop.run(_until_stopped(options, tell))


async def _until_stopped(options: Options, tell: Tell) -> ServeReport:
    running = asyncio.current_task()
    assert running is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    return await run(options, tell)


@contextmanager
def _bar(console: Console) -> Iterator[Tell]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("semel bench serve")

        def tell(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        yield tell


@contextmanager
def _lines(console: Console) -> Iterator[Tell]:
    printed: list[str] = []

    def tell(what: str, done: int, total: int) -> None:  # noqa: ARG001
        if printed[-1:] != [what]:
            printed.append(what)
            console.print(f"semel bench serve: {what}", highlight=False)

    yield tell
