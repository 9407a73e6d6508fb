"""`semel testing`: what one needs to try semel without downloading anything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import typer
from rich.console import Console

from semel.cells.settings import CellSettings
from semel.cli.flags import Call, HelpGroup, command
from semel.core.flag import REQUIRED, flag, same_flag, section
from semel.settings.frontend import FrontendSettings, ServingSettings
from semel.settings.serve import ServeSettings
from semel.settings.worker import AdminSettings, WorkerSettings

__all__ = ["ModelSettings", "TestingServeSettings", "TestingWorkerSettings", "testing"]

testing = typer.Typer(
    help="What one needs to try semel without downloading anything.",
    cls=HelpGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
)
console = Console()


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The options of `semel testing model`."""

    family: str = flag(
        REQUIRED,
        help="The family, as qwen2-vl; a name that does not exist is answered with all that do.",
        group="Output",
        is_positional=True,
    )
    directory: Path = flag(REQUIRED, help="The model folder to write.", group="Output", is_positional=True)


@command(testing, ModelSettings)
def model(call: Call[ModelSettings]) -> None:
    """Write a tiny real model with random weights: real code paths, exact answers, no meaning in the text."""
    from semel.lab.testing.models import build

    family, directory = call.settings.family, call.settings.directory
    with console.status(f"building {family}"):
        build(family, directory)
    console.print(f"{directory}: a tiny {family}", highlight=False)


@dataclass(frozen=True, slots=True)
class TestingWorkerSettings:
    """The options of `semel testing worker`."""

    model: str = same_flag(FrontendSettings, "model")
    listen: str = same_flag(WorkerSettings, "listen")
    key_file: Path | None = same_flag(FrontendSettings, "key_file")
    key_dir: Path | None = same_flag(FrontendSettings, "key_dir")
    rate: float = flag(20.0, help="Tokens per second for each request.", group="Worker", min=0.01)
    phases: int = flag(1, help="Number of groups of requests that get their tokens in turn.", group="Worker", min=1)
    answers: Literal["words", "input"] = flag(
        "words",
        help="Numbered words with the time, or tokens that are a function of the prompt and its items.",
        group="Worker",
    )
    cache_bytes: int = flag(
        1 << 30, "item-cache-gb", help="Size of the engine's item cache, in GiB.", group="Worker", unit="GiB", min=0
    )
    drain_delay_s: float = same_flag(WorkerSettings, "drain_delay_s")
    drain_s: float = same_flag(WorkerSettings, "drain_s")
    processor: Literal["auto", "hf", "vllm"] = same_flag(WorkerSettings, "processor")
    admin_port: int | None = same_flag(AdminSettings, "admin_port")
    cell: CellSettings = section(CellSettings)


@command(testing, TestingWorkerSettings, "worker")
def rehearsal(call: Call[TestingWorkerSettings]) -> None:
    """Start a worker whose engine has no model: it answers with numbered words at a steady rate."""
    import uvloop

    from semel.cli.log_relay import relayed_logs
    from semel.lab.testing.modelless_worker import run_modelless_worker
    from semel.lab.testing.pacing import DeterministicEngine, PacedEngine

    settings = call.settings
    engine = DeterministicEngine if settings.answers == "input" else PacedEngine
    worker = WorkerSettings(
        settings.model,
        settings.listen,
        settings.key_file,
        settings.key_dir,
        settings.drain_delay_s,
        settings.drain_s,
        settings.processor,
        admin=AdminSettings(settings.admin_port),
        cell=settings.cell,
    )
    with relayed_logs("text"):
        uvloop.run(
            run_modelless_worker(
                worker, rate=settings.rate, phases=settings.phases, engine=engine, cache_bytes=settings.cache_bytes
            )
        )


@dataclass(frozen=True, slots=True)
class TestingServeSettings:
    """The options of `semel testing serve`."""

    model: str = same_flag(FrontendSettings, "model")
    rate: float = same_flag(TestingWorkerSettings, "rate")
    drain_delay_s: float = same_flag(ServeSettings, "drain_delay_s")
    serving: ServingSettings = section(ServingSettings)


@command(testing, TestingServeSettings, "serve", server_flags=True)
def rehearse(call: Call[TestingServeSettings]) -> None:
    """Serve a model without its engine: numbered words at a steady rate, for trying clients without weights."""
    from semel.cli.checks import refuse, warn
    from semel.cli.checks.start import key_warnings
    from semel.cli.serve import ServeOptions, serve

    refuse(call.findings)
    warn([*call.findings, *key_warnings(call.settings.serving.keys)])
    settings = call.settings
    options = ServeOptions(
        ServeSettings(settings.model, drain_delay_s=settings.drain_delay_s, serving=settings.serving),
        worker_flags=call.arguments(TestingWorkerSettings, but=("model", "drain_delay_s")),
        frontend_flags=call.arguments(ServingSettings),
        worker=("testing", "worker"),
    )
    raise typer.Exit(serve(options))
