"""`semel batch`: a batch file against a running server, or against a `semel serve` of its own, with a progress bar."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final
from urllib.parse import urlsplit

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from semel.batch.run import BatchProgress, run_batch
from semel.batch.settings import BatchSettings
from semel.cli.output import Output
from semel.cli.serve import console, stderr, until_ready
from semel.cli.supervisor import Child
from semel.errors import ConfigError
from semel.settings.environment import client_key
from semel.shutdown import ShutdownSignal
from semel.web.listener import bind

__all__ = ["run"]

_URL: Final = "http://127.0.0.1:8000"
_HOST: Final = "127.0.0.1"
_END_S: Final = 15.0
_LINES_S: Final = 10.0
"""Seconds between two lines of progress where there is no terminal."""


def run(settings: BatchSettings, flags: Sequence[str], *, serve: Sequence[str] = ("serve",)) -> int:
    """Run a batch, and return the exit code: 1 if a line has an error or was not sent.

    `serve` is the command of semel that starts a server of its own.
    """
    if settings.model is not None and settings.model.startswith("-"):
        raise ConfigError(
            f"{settings.model} is a flag of `semel serve`, which is started for a MODEL: name it after OUTPUT"
        )
    if settings.model is not None and settings.base_url is not None:
        raise ConfigError("MODEL starts a server, and --base-url names one that runs: leave one of them out")
    if settings.base_url is not None and not _is_url(settings.base_url):
        raise ConfigError(f"--base-url {settings.base_url}: write http://HOST:PORT or https://HOST")
    try:
        return asyncio.run(_run(settings, [*serve, settings.model or "", *flags]))
    finally:
        stderr.drain()


def _is_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # of its port, or of an IPv6 address
        return False


async def _run(settings: BatchSettings, serve: Sequence[str]) -> int:
    stopping = ShutdownSignal.listening()
    async with _server(settings, serve, stopping) as url:
        if stopping.is_requested:
            return 1
        with _progress() as show:
            work = asyncio.create_task(run_batch(settings, url, settings.api_key or client_key(), show))
            if await stopping.wait(work):
                work.cancel()
                await asyncio.wait([work])
                console.print(
                    f"stopped; the same command goes on with {settings.output}", highlight=False, soft_wrap=True
                )
                return 1
    state = work.result()
    console.print(
        f"{state.done:,} results in {settings.output}, {state.failed:,} of them errors", highlight=False, soft_wrap=True
    )
    return int(state.failed > 0)


@asynccontextmanager
async def _server(settings: BatchSettings, serve: Sequence[str], stopping: ShutdownSignal) -> AsyncIterator[str]:
    """The URL of the server: of the one that is named, or of one that is started here and ends with the batch."""
    if settings.model is None:
        yield settings.base_url or _URL
        return
    with bind(_HOST, 0) as socket:
        port = socket.getsockname()[1]
    output = Output(stderr.writer, is_visible=False)
    command = [sys.executable, "-m", "semel", *serve, f"--host={_HOST}", f"--port={port}"]
    child = Child("server", command, output=output.descriptor)
    keeping = asyncio.create_task(child.keep())
    is_ready = False
    try:
        await until_ready(settings.model, f"http://{_HOST}:{port}", [child], [keeping], stopping, output)
        is_ready = True
        yield f"http://{_HOST}:{port}"
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])
        with console.status("ending the server"):
            await child.end(_END_S)
        output.close(keep_file=not is_ready)


@contextmanager
def _progress() -> Iterator[Callable[[BatchProgress], object]]:
    """Shows the progress: as a bar, or in lines where there is no terminal."""
    if not console.is_terminal:
        yield _Lines()
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None, figures="")
        yield lambda state: bar.update(task, completed=state.done, total=state.total, figures=state.figures)


class _Lines:
    """Progress in lines, not too often."""

    def __init__(self) -> None:
        self._next_s = _LINES_S

    def __call__(self, state: BatchProgress) -> None:
        if state.seconds >= self._next_s:
            self._next_s = state.seconds + _LINES_S
            total = "?" if state.total is None else f"{state.total:,}"
            console.print(f"{state.done:,} of {total} lines, {state.figures}", highlight=False, soft_wrap=True)
