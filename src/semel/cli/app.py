"""The commands. What each takes is declared in the settings that it fills; what it needs is imported when it runs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import typer
from rich.console import Console

from semel.batch.settings import BatchSettings
from semel.cli.cells import cells
from semel.cli.flags import Call, HelpGroup, command, version_line
from semel.cli.keys import key
from semel.core.flag import GIB, flag, same_flag, section
from semel.embeddings.settings import EmbeddingStoreSettings
from semel.errors import ConfigError
from semel.settings.frontend import FrontendSettings, ServerSettings, ServingSettings
from semel.settings.serve import ServeSettings
from semel.settings.worker import WorkerSettings
from semel.sizing import Host, Part, memory_of

__all__ = ["app"]

app = typer.Typer(
    name="semel",
    help=(
        "The multimodal data plane for LLM serving: repeated images, audio and video are not decoded, preprocessed, "
        "shipped or encoded again."
    ),
    cls=HelpGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
console = Console()


@command(app, ServeSettings, engine_flags=True, server_flags=True)
def serve(call: Call[ServeSettings]) -> None:
    """Serve a model on this machine: a worker and a frontend, restarted if they fail."""
    from semel.cli.checks import refuse, warn
    from semel.cli.checks.engine_flags import read_engine_flags
    from semel.cli.checks.start import key_warnings, serve_findings
    from semel.cli.placement import placements
    from semel.cli.serve import ServeOptions, serve
    from semel.settings.environment import shut_door, trace_collector
    from semel.telemetry.tracing import check_installed

    shut_door()
    settings = call.settings
    check_installed(trace_collector(settings.serving.logs.otlp_traces_endpoint))
    refuse([*call.findings, *(() if settings.start.skip_checks else serve_findings(settings, call.rest))])
    warn([*call.findings, *key_warnings(settings.serving.keys)])
    passed_on = ("model", "fleet_key_file", "key_dir", "admin_port", "skip_checks", "drain_delay_s")
    options = ServeOptions(
        settings,
        worker_flags=["--skip-checks", *call.arguments(WorkerSettings, but=passed_on), *call.rest],
        frontend_flags=call.arguments(ServingSettings),
        placements=placements(settings.workers, read_engine_flags(call.rest)),
    )
    raise typer.Exit(serve(options))


@command(app, FrontendSettings, server_flags=True)
def frontend(call: Call[FrontendSettings]) -> None:
    """Start a frontend: OpenAI's API over HTTP, without a GPU."""
    import uvloop

    from semel.cli.checks import refuse, warn
    from semel.cli.checks.start import frontend_findings, key_warnings
    from semel.cli.log_relay import relayed_logs
    from semel.compose import run_frontend
    from semel.settings.environment import shut_door

    shut_door()
    with relayed_logs(call.settings.serving.logs.log_format, call.settings.serving.cell.name):
        refuse([*call.findings, *(() if call.settings.start.skip_checks else frontend_findings(call.settings))])
        warn([*call.findings, *key_warnings(call.settings.serving.keys)])
        uvloop.run(run_frontend(call.settings))


@command(app, WorkerSettings, engine_flags=True, server_flags=True)
def worker(call: Call[WorkerSettings]) -> None:
    """Start a worker: the process that runs vLLM's engine."""
    import uvloop

    from semel.cli.checks import refuse, warn
    from semel.cli.checks.start import worker_findings
    from semel.cli.log_relay import engine_logs, relayed_logs
    from semel.compose import run_worker
    from semel.settings.environment import shut_door

    shut_door()
    log_format = call.settings.logs.log_format
    with relayed_logs(log_format, call.settings.cell.name), engine_logs(log_format):
        skips = call.settings.start.skip_checks
        refuse([*call.findings, *(() if skips else worker_findings(call.settings, call.rest))])
        warn(call.findings)
        uvloop.run(run_worker(call.settings, call.rest))


@dataclass(frozen=True, slots=True)
class DoctorSettings:
    """The settings of `semel doctor`."""

    model: str | None = flag(None, help="A model to check as well.", group="Server", is_common=True, is_positional=True)
    host: str = same_flag(ServerSettings, "host")
    port: int = same_flag(ServerSettings, "port")
    vllm: bool = flag(
        False,
        help="Check plain vLLM with semel inside instead: what SEMEL switches on, what is off, and why.",
        group="Server",
    )
    worker: str | None = flag(
        None,
        help="Show instead what a running worker has proven at its start: the URL of its --admin-port.",
        group="Server",
    )
    store: EmbeddingStoreSettings = section(EmbeddingStoreSettings)


@command(app, DoctorSettings, engine_flags=True)
def doctor(call: Call[DoctorSettings]) -> None:
    """Check what semel needs on this machine, and say how to fix what is missing.

    The checks of a model are those that run before a start; vLLM's flags count.
    """
    from semel.cli.doctor import examine, examine_door, examine_worker

    settings = call.settings
    marks = {"ok": "[green]ok     [/]", "warning": "[yellow]warning[/]", "problem": "[red]problem[/]"}
    failed = False
    findings = examine(settings.model, settings.host, settings.port, call.rest, store=settings.store)
    if settings.worker is not None:
        findings = examine_worker(settings.worker.rstrip("/"))
    for finding in examine_door() if settings.vllm else findings:
        failed |= finding.verdict == "problem"
        remedy = f"  → {finding.remedy}" if finding.remedy else ""
        console.print(
            f"{marks[finding.verdict]} {finding.what}: {finding.detail}{remedy}", highlight=False, soft_wrap=True
        )
    raise typer.Exit(int(failed))


@command(app, Host)
def size(call: Call[Host]) -> None:
    """Print how much memory a host needs at most, and for what."""
    parts = memory_of(call.settings)
    for part in (*parts, Part("in all", sum(part.nbytes for part in parts))):
        console.print(f"{part.nbytes / GIB:8.2f} GiB  {part.name}", highlight=False)


@dataclass(frozen=True, slots=True)
class TopSettings:
    """The settings of `semel top`."""

    url: tuple[str, ...] = flag(
        ("http://127.0.0.1:8000",),
        help="URLs of frontends and workers that serve /metrics, one or more.",
        group="Measurement",
        is_positional=True,
    )
    every_s: float = flag(2.0, help="Seconds between two readings.", group="Measurement", unit="seconds", min=0.2)
    svg: Path | None = flag(None, help="Draw one page to this SVG file, and exit.", group="Output")


@command(app, TopSettings)
def top(call: Call[TopSettings]) -> None:
    """Show what a fleet is doing: traffic, cache hits, bytes saved, latency by stage, workers."""
    from semel.cli.top import save, watch

    settings = call.settings
    if settings.svg is not None:
        save(settings.url, settings.svg, every_s=settings.every_s)
        return
    with contextlib.suppress(KeyboardInterrupt):
        watch(settings.url, every_s=settings.every_s, console=console)


@command(app, BatchSettings, engine_flags=True)
def batch(call: Call[BatchSettings]) -> None:
    """Send the lines of an OpenAI batch file to a server, and write their results; the same command goes on.

    With MODEL, the server is a `semel serve` that is started for it with the flags that follow. Exits with 1 if a line
    has an error.
    """
    try:
        from semel.cli.batch import run
    except ImportError as error:
        raise ConfigError(f"`semel batch` needs {error.name}: `pip install 'semel[client]'`") from None
    raise typer.Exit(run(call.settings, call.rest))


@dataclass(frozen=True, slots=True)
class NoSettings:
    """The settings of a command without any."""


@command(app, NoSettings)
def version(_: Call[NoSettings]) -> None:
    """Print the version."""
    console.print(version_line(), highlight=False)


app.add_typer(key, name="key")
app.add_typer(cells, name="cells")

with contextlib.suppress(PackageNotFoundError):  # sources that are not installed have the product's commands
    for entry in distribution("semel").entry_points.select(group="semel.commands"):
        entry.load()(app)
