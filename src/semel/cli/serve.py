"""`semel serve`: workers and a frontend on one machine, as one command."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import IO, Final, cast, get_args

from rich.console import Console

from semel.cli.output import Output, StandardError
from semel.cli.start_log import Progress
from semel.cli.supervisor import Child, end_at_once, ending
from semel.engine.vllm.compat.internals import SOCKET_FOLDER, SOCKET_NAME_CHARS
from semel.errors import ConfigError
from semel.settings.environment import run_folder
from semel.settings.frontend import ServingSettings
from semel.settings.secrets import create_key, has_api_keys
from semel.settings.serve import ServeSettings
from semel.shutdown import ShutdownSignal
from semel.telemetry.log_writer import DROPPED
from semel.telemetry.logs import LogFormat, log_to_stderr
from semel.web.listener import bind
from semel.wire.proof import Role

__all__ = ["ServeOptions", "ready_url", "serve", "until_ready"]

_END_S: Final = 6.5
_POLL_S: Final = 0.25
_MAX_SOCKET_CHARS: Final = 107  # what the kernel takes for a socket's path

logger = logging.getLogger(__name__)
stderr = StandardError()
console = Console(file=cast("IO[str]", stderr))


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The settings of `semel serve`, and what it starts its children with."""

    settings: ServeSettings
    worker_flags: Sequence[str]
    """semel's and vLLM's."""

    frontend_flags: Sequence[str]
    worker: Sequence[str] = ("worker",)
    """The command of semel that starts a worker."""

    placements: Sequence[Mapping[str, str]] = ({},)
    """For each worker, what its environment has: which devices are its own."""

    @property
    def log_format(self) -> LogFormat:
        """The format of its log, and of its children's."""
        return self.settings.serving.logs.log_format

    @property
    def url(self) -> str:
        """The address for clients."""
        server = self.settings.serving.server
        return f"{'https' if self.settings.serving.tls.is_on else 'http'}://{server.host}:{server.port}"


def ready_url(serving: ServingSettings) -> str | None:
    """Return the address to ask for /ready, if clients need a certificate where they connect; else None."""
    if serving.tls.cert_reqs != ssl.CERT_REQUIRED:
        return None
    if not serving.metrics_port:
        raise ConfigError(
            "--ssl-cert-reqs 2 needs --metrics-port: probes have no certificate, and are answered there without one"
        )
    return f"http://{serving.metrics_host}:{serving.metrics_port}"


def serve(options: ServeOptions) -> int:
    """Run until Ctrl-C; returns the exit code."""
    server = options.settings.serving.server
    log_to_stderr(options.log_format, level=logging.WARNING, text="semel: %(message)s", writer=stderr.writer)
    logger.setLevel(logging.INFO)
    bind(server.host, server.port).close()  # before half a minute of loading
    try:
        with run_folder() as folder:
            return asyncio.run(_supervise(options, folder))
    finally:
        stderr.writer.flush()


async def _supervise(options: ServeOptions, folder: Path) -> int:
    settings = options.settings
    probed, drain_s = ready_url(settings.serving) or options.url, settings.serving.server.drain_s
    stopping = ShutdownSignal.listening()
    is_quiet = console.is_terminal and not settings.verbose and options.log_format == "text"
    output = Output(stderr.writer, is_visible=not is_quiet, form=options.log_format)
    children = _children(options, folder, output.descriptor)
    tasks = [asyncio.create_task(child.keep()) for child in children]
    has_failed = True
    try:
        await until_ready(settings.model, probed, children, tasks, stopping, output)
        if not stopping.is_requested:
            output.begin()
            _greet(options)
            if not await stopping.wait(*tasks):
                _raise_ended(tasks)
        has_failed = False
        return 0
    finally:
        if console.is_terminal:
            output.show_warnings(partial(console.print, highlight=False, soft_wrap=True, markup=False))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with console.status("ending"):
            within_s = settings.drain_delay_s + drain_s + _END_S
            await stopping.unless_forced(_end(children, within_s))
            await end_at_once(children, _END_S)
        output.close(keep_file=has_failed)


async def _end(children: Sequence[Child], within_s: float) -> None:
    """End the frontend first, which has requests to answer; then all workers at the same time."""
    *workers, frontend = children
    await frontend.end(within_s)
    await end_at_once(workers, within_s)


def _children(options: ServeOptions, folder: Path, output: int | None) -> list[Child]:
    """Make the workers, and last the frontend."""
    settings, keys = options.settings, _key_flags(options.settings, folder)
    command = [sys.executable, "-m", "semel"]
    # vLLM's own sockets go where ours are, and are removed with them, however its processes end.
    fits = len(str(folder)) + SOCKET_NAME_CHARS <= _MAX_SOCKET_CHARS
    sockets = {SOCKET_FOLDER: str(folder)} if fits else {}
    children, addresses, first_port = [], [], settings.admin.admin_port
    for number, placement in enumerate(options.placements):
        several = len(options.placements) > 1
        address = f"ipc://{folder}/worker{f'-{number + 1}' if several else ''}.sock"
        admin = [] if first_port is None else [f"--admin-port={first_port + number if first_port else 0}"]
        flags = ["--listen", address, *keys["worker"], *admin, *options.worker_flags, "--drain-delay-s=0"]
        name = f"worker {number + 1}" if several else "worker"
        children.append(
            Child(name, [*command, *options.worker, settings.model, *flags], {**sockets, **placement}, output)
        )
        addresses += ["--worker", address]
    flags = [*addresses, *keys["frontend"], "--skip-checks", *options.frontend_flags]
    flags.append(f"--drain-delay-s={settings.drain_delay_s}")
    dropped = stderr.writer.share()
    frontend = Child(
        "frontend", [*command, "frontend", settings.model, *flags], {DROPPED: str(dropped)}, output, [dropped]
    )
    return [*children, frontend]


def _key_flags(settings: ServeSettings, folder: Path) -> Mapping[Role, Sequence[str]]:
    """Return the key flags of each role; without any that are named, they share a key that goes with this run."""
    if settings.key_dir is not None:
        return {role: ("--key-dir", str(settings.key_dir / role)) for role in get_args(Role)}
    key_file = settings.key_file
    if key_file is None:
        key_file = folder / "key"
        create_key(key_file)
    return dict.fromkeys(get_args(Role), ("--fleet-key-file", str(key_file)))


async def until_ready(
    model: str,
    url: str,
    children: Sequence[Child],
    tasks: Sequence[asyncio.Task[None]],
    stopping: ShutdownSignal,
    output: Output,
) -> None:
    """Wait until requests are served, showing what is waited for; a child that cannot start ends everything."""
    ended: list[str] = []
    for child in children:
        child.on_exit = partial(_give_up, ended, child.name)
    with console.status(f"starting {model}") as status:
        progress = Progress(status.update if output.path is not None else None)
        while not stopping.is_requested:
            _raise_ended(tasks)
            output.read()
            if ended:
                raise ConfigError(_failure(ended[0], output))
            ready, reason = await asyncio.to_thread(_ask_ready, url)
            if ready:
                break
            assert output.log is not None
            progress.show(output.log.stage, reason)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), _POLL_S)
    for child in children:
        child.on_exit = None


def _failure(ended: str, output: Output) -> str:
    """Say the cause first, then who ended of it, and where the rest is."""
    where = "its messages are above" if output.path is None else f"everything that was printed is in {output.path}"
    cause = "" if output.log is None else output.log.cause
    return f"{cause}\n{ended}; {where}" if cause else f"{ended}; {where}"


def _give_up(ended: list[str], name: str, code: int) -> bool:
    """Say that a child has ended before it was ready, and do not start it again: it would end in the same way."""
    ended.append(f"the {name} could not start: it {ending(code)}, and is not started again")
    return False


def _raise_ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Raise why nobody keeps a child running any more: the command must not stay without it."""
    for task in tasks:
        if task.done():
            task.result()


def _ask_ready(url: str) -> tuple[bool, str]:
    try:
        context = _unverified() if url.startswith("https:") else None
        with urllib.request.urlopen(f"{url}/ready", timeout=2, context=context) as reply:  # noqa: S310
            return reply.status == 200, ""
    except urllib.error.HTTPError as error:
        with contextlib.suppress(ValueError, OSError, HTTPException):  # its body may be late, or cut off
            return False, str(json.loads(error.read()).get("reason"))
        return False, f"the frontend answers {error.code}"
    except (OSError, HTTPException):
        return False, "the frontend is starting"


def _unverified() -> ssl.SSLContext:
    """Accept any certificate: our own child is asked, on this machine, and gets no secret."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _greet(options: ServeOptions) -> None:
    if options.log_format == "json":  # for a program, which needs nothing else
        logger.info("semel is ready: %s/v1", options.url)
        return
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16})
    console.print(f"semel is ready: {options.url}/v1", highlight=False, style="bold green")
    key = '-H "Authorization: Bearer $API_KEY" ' if has_api_keys(options.settings.serving.keys) else ""
    lines = [f"  curl {options.url}/v1/chat/completions {key}-H 'content-type: application/json' -d '{body}'"]
    if key:
        lines.append("  API_KEY is one of your API keys.")
    for line in (*lines, "  Ctrl-C ends it."):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
