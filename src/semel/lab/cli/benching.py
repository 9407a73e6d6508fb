"""A run against two servers at a terminal: a progress bar on standard error, or lines where there is no terminal.

Ctrl-C and SIGTERM end the servers that it started before it ends itself.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from semel.lab.bench.serving.bench import Tell
from semel.lab.bench.serving.report import ServeReport
from semel.lab.bench.serving.run import Options, run

__all__ = ["bench_serving", "shown_progress", "until_stopped"]

_Result = TypeVar("_Result")


def bench_serving(options: Options) -> ServeReport:
    """Run `semel bench serve`, and show how far it is."""
    with shown_progress("semel bench serve") as tell:
        return uvloop.run(until_stopped(run(options, tell)))


async def until_stopped(work: Awaitable[_Result]) -> _Result:
    """Await the work; a signal cancels it."""
    running = asyncio.current_task()
    assert running is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    return await work


def shown_progress(title: str) -> AbstractContextManager[Tell]:
    """Shows on standard error what a command is at."""
    console = Console(stderr=True)
    return (_bar if console.is_terminal else _lines)(console, title)


@contextmanager
def _bar(console: Console, title: str) -> Iterator[Tell]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title)

        def tell(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        yield tell


@contextmanager
def _lines(console: Console, title: str) -> Iterator[Tell]:
    printed: list[str] = []

    def tell(what: str, done: int, total: int) -> None:  # noqa: ARG001
        if printed[-1:] != [what]:
            printed.append(what)
            console.print(f"{title}: {what}", highlight=False)

    yield tell
