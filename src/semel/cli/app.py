"""The commands and what they take."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, NoReturn

import typer
from rich.console import Console

from semel.cli.flags import as_arguments, takes_flags_of

if TYPE_CHECKING:
    from semel.bench.report import Report

__all__ = ["app"]

app = typer.Typer(
    name="semel",
    help="The multimodal data plane for LLM serving: every image is fetched, preprocessed, shipped and encoded once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
testing = typer.Typer(help="What one needs to try semel without downloading anything.", no_args_is_help=True)
app.add_typer(testing, name="testing")
bench = typer.Typer(help="Measured comparisons with bare vLLM, both sides in one run.", no_args_is_help=True)
app.add_typer(bench, name="bench")

console = Console()


@app.command()
def version() -> None:
    """Print the version."""
    console.print(f"semel {installed_version('semel')}", highlight=False)


@app.command()
def key(path: Annotated[Path, typer.Argument(help="The file to make; it must not exist.")]) -> None:
    """Make a fleet key: 32 secret bytes that every process of one fleet shares and that key every digest."""
    from semel.settings import create_key

    made = create_key(path)
    console.print(f"{path}: fleet key {made.id}. Give it to every frontend and worker as --key-file.", highlight=False)


_MAX_BODY_BYTES: Final = 256 * 1024**2


_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}
_Model = Annotated[str, typer.Argument(help="A model folder, or a model's name on the hub.")]
_Host = Annotated[str, typer.Option(help="The address to serve at.")]
_Port = Annotated[int, typer.Option(help="The port to serve at.")]
_KeyFile = Annotated[Path, typer.Option(help="The fleet key (`semel key FILE` makes one).")]
_ChatTemplate = Annotated[str | None, typer.Option(help="A chat template: a file, or Jinja itself.")]
_Processes = Annotated[int | None, typer.Option(min=1, help="Preprocessing processes; one per core unless given.")]
_MaxBody = Annotated[int, typer.Option(help="The largest request in bytes.")]
_CacheKind = Annotated[
    Literal["shared", "lru"], typer.Option(help="Where features are kept: in shared memory, or in the process.")
]
_CacheGb = Annotated[float, typer.Option(help="GiB for them; 0 keeps none.")]
_Processor = Annotated[
    Literal["auto", "hf", "vllm"],
    typer.Option(
        help="Where features come from, the same on every worker and frontend: the model's HF processor, or vLLM's; "
        "auto takes the former for families that semel knows."
    ),
]
_ApiKey = Annotated[
    list[str] | None,
    typer.Option(help="A key that clients must send; may be given several times. Others see it in `ps`."),
]
_ApiKeysFile = Annotated[
    Path | None, typer.Option(help="A file of keys, a line `TENANT KEY` for each: tenants share nothing.")
]
_MetricsPort = Annotated[
    int | None, typer.Option(help="Serve /metrics at this port of 127.0.0.1 too; with API keys, only there.")
]
_Planning = Annotated[bool, typer.Option("--encoder-planning", help="Let semel plan vLLM's encoder as well.")]


def frontend(
    model: _Model,
    worker: Annotated[list[str], typer.Option(help="Where a worker listens; once for each of them.")],
    key_file: _KeyFile,
    host: _Host = "127.0.0.1",
    port: _Port = 8000,
    chat_template: _ChatTemplate = None,
    processes: _Processes = None,
    max_body_bytes: _MaxBody = _MAX_BODY_BYTES,
    feature_cache: _CacheKind = "shared",
    feature_cache_gb: _CacheGb = 1.0,
    processor: _Processor = "auto",
    api_key: _ApiKey = None,
    api_keys_file: _ApiKeysFile = None,
    metrics_port: _MetricsPort = None,
) -> None:
    """Start a frontend: OpenAI's API over HTTP, without a GPU."""
    import uvloop

    from semel.assemble import FrontendOptions, run_frontend
    from semel.processing.cores import usable_cores
    from semel.settings import read_api_keys, read_key

    _log_to_stderr()
    options = FrontendOptions(
        model=model,
        workers=worker,
        key=read_key(key_file),
        host=host,
        port=port,
        chat_template=chat_template,
        processes=processes or usable_cores(),
        max_body_bytes=max_body_bytes,
        cache_kind=feature_cache,
        cache_bytes=int(feature_cache_gb * 1024**3),
        processor=processor,
        api_keys=read_api_keys(api_keys_file, api_key or ()),
        metrics_port=metrics_port,
    )
    uvloop.run(run_frontend(options))


@app.command(context_settings=_FLAGS)
@takes_flags_of(frontend, but=("model", "worker", "key_file", "host", "port"))
def serve(
    context: typer.Context,
    model: _Model,
    host: _Host = "127.0.0.1",
    port: _Port = 8000,
    key_file: Annotated[
        Path | None, typer.Option(help="The fleet key; without one, a key is made for this run.")
    ] = None,
    **flags: object,
) -> None:
    """Serve a model on this machine: a worker and a frontend, kept alive. Takes every engine flag of vLLM."""
    from semel.cli.serve import ServeOptions, serve

    engine_flags = ["--processor", str(flags["processor"]), *context.args]
    raise typer.Exit(serve(ServeOptions(model, host, port, key_file, engine_flags, as_arguments(flags))))


@app.command(context_settings=_FLAGS)
def worker(
    context: typer.Context,
    model: _Model,
    listen: Annotated[str, typer.Option(help="ipc:///DIRECTORY/NAME, or tcp://HOST:PORT (encrypted).")],
    key_file: _KeyFile,
    encoder_planning: _Planning = False,
    admin_port: Annotated[
        int | None, typer.Option(help="Serve metrics, injection and reset at this port of 127.0.0.1.")
    ] = None,
    admin_key_file: Annotated[
        Path | None, typer.Option(help="The key for injection and reset: a file of 16 printable characters or more.")
    ] = None,
    drain_s: Annotated[float, typer.Option(help="Seconds for running requests when it is stopped.")] = 2.0,
    processor: _Processor = "auto",
) -> None:
    """Start a worker: the process that embeds the engine. Takes every engine flag of vLLM."""
    import asyncio

    from semel.assemble import WorkerOptions, run_worker
    from semel.settings import read_admin_key, read_key

    _log_to_stderr()
    key = read_key(key_file)
    admin_key = None if admin_key_file is None else read_admin_key(admin_key_file)
    options = WorkerOptions(
        model, listen, key, context.args, encoder_planning, admin_port, admin_key, drain_s, processor
    )
    asyncio.run(run_worker(options))


app.command()(frontend)


@app.command()
def doctor(
    model: Annotated[str | None, typer.Argument(help="A model folder to look at as well.")] = None,
    host: _Host = "127.0.0.1",
    port: _Port = 8000,
) -> None:
    """Look at what semel needs on this machine, and say what to do about it."""
    from semel.cli.doctor import examine

    marks = {"ok": "[green]ok     [/]", "warning": "[yellow]warning[/]", "problem": "[red]problem[/]"}
    failed = False
    for finding in examine(model, host, port):
        failed |= finding.verdict == "problem"
        remedy = f"  → {finding.remedy}" if finding.remedy else ""
        console.print(
            f"{marks[finding.verdict]} {finding.what}: {finding.detail}{remedy}", highlight=False, soft_wrap=True
        )
    raise typer.Exit(int(failed))


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


def _report(run: Callable[..., Report], *, quick: bool, as_json: bool, plot: Path | None) -> NoReturn:
    # vLLM logs to whatever standard output is when it is imported; ours is for the report alone.
    with Console(stderr=True).status("measuring"), contextlib.redirect_stdout(sys.stderr):
        report = run(quick=quick)
    if as_json:
        typer.echo(report.to_json())
    else:
        report.print_table(console)
    if plot is not None:
        report.plot(plot)
    raise typer.Exit(int(not report.ok))


def _log_to_stderr() -> None:
    import logging

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s %(name)s: %(message)s")


@testing.command()
def model(
    family: Annotated[
        str, typer.Argument(help="qwen2-vl, qwen2.5-vl, llava, idefics3, gemma3, qwen2-audio or whisper.")
    ],
    directory: Annotated[Path, typer.Argument(help="Where to write the model folder.")],
) -> None:
    """Write a tiny real model with random weights: real code paths, exact answers, no meaning in the text."""
    from semel.testing.models import build

    with console.status(f"building {family}"):
        build(family, directory)
    console.print(f"{directory}: a tiny {family}", highlight=False)
