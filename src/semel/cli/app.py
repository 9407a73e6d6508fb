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

from semel.cli import decoding, fetching
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


_MIB: Final = 1024**2


_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}
_Model = Annotated[str, typer.Argument(help="A model folder, or a model's name on the hub.")]
_Host = Annotated[str, typer.Option(help="The address to serve at.")]
_Port = Annotated[int, typer.Option(help="The port to serve at.")]
_KeyFile = Annotated[Path, typer.Option(help="The fleet key (`semel key FILE` makes one).")]
_ChatTemplate = Annotated[str | None, typer.Option(help="A chat template: a file, or Jinja itself.")]
_Processes = Annotated[int | None, typer.Option(min=1, help="Preprocessing processes; one per core unless given.")]
_MaxBody = Annotated[int, typer.Option(min=1, help="The largest body of a request, in bytes.")]
_MaxBodyValues = Annotated[int, typer.Option(min=1, help="The most values in the JSON of a request.")]
_MaxBodyS = Annotated[float, typer.Option(min=0.001, help="The longest that a body may take to come, in seconds.")]
_MaxRequestMedia = Annotated[
    int, typer.Option(min=1, help="Bytes that one request may bring: its body, decoded media, fetched media.")
]
_MaxMediaInFlight = Annotated[
    int, typer.Option(min=1, help="Bytes that all requests together may hold until their answers begin.")
]
_MaxRefusals = Annotated[
    float,
    typer.Option(min=0, help="Refusals a second to one tenant; more of them wait, 5 s at most. 0: none waits."),
]
_MaxWaiting = Annotated[int, typer.Option(min=1, help="Requests that may wait for their answers to begin.")]
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
    key_file: _KeyFile,
    worker: Annotated[list[str] | None, typer.Option(help="Where a worker listens; once for each of them.")] = None,
    workers_file: Annotated[
        Path | None, typer.Option(help="A file of such addresses, one in a line; it is watched.")
    ] = None,
    workers_dns: Annotated[
        list[str] | None, typer.Option(help="NAME:PORT: a worker listens at each address of the name, over tcp.")
    ] = None,
    workers_dns_s: Annotated[int, typer.Option(min=1, help="Seconds between two looks at DNS.")] = 10,
    host: _Host = "127.0.0.1",
    port: _Port = 8000,
    chat_template: _ChatTemplate = None,
    processes: _Processes = None,
    max_body_bytes: _MaxBody = 256 * _MIB,
    max_body_values: _MaxBodyValues = 262_144,
    max_body_s: _MaxBodyS = 120.0,
    max_request_media_bytes: _MaxRequestMedia = 512 * _MIB,
    max_media_bytes_in_flight: _MaxMediaInFlight = 2_048 * _MIB,
    max_waiting_requests: _MaxWaiting = 2_048,
    max_refusals_per_s: _MaxRefusals = 20.0,
    feature_cache: _CacheKind = "shared",
    feature_cache_gb: _CacheGb = 1.0,
    allowed_media_domains: fetching.AllowedDomains = None,
    allow_media_http: fetching.AllowHttp = False,
    allowed_media_networks: fetching.AllowedNetworks = None,
    allowed_local_media_path: fetching.AllowedPath = None,
    max_media_bytes: fetching.MaxBytes = fetching.MAX_BYTES,
    media_timeout_s: fetching.TimeoutS = fetching.TIMEOUT_S,
    media_cache_gb: fetching.CacheGb = 0.25,
    max_image_pixels: decoding.MaxImagePixels = decoding.DEFAULTS.max_image_pixels,
    min_image_side: decoding.MinImageSide = decoding.DEFAULTS.min_image_side,
    max_audio_s: decoding.MaxAudioS = decoding.DEFAULTS.max_audio_s,
    max_audio_channels: decoding.MaxAudioChannels = decoding.DEFAULTS.max_audio_channels,
    max_video_s: decoding.MaxVideoS = decoding.DEFAULTS.max_video_s,
    max_video_frames: decoding.MaxVideoFrames = decoding.DEFAULTS.max_video_frames,
    max_video_pixels: decoding.MaxVideoPixels = decoding.DEFAULTS.max_video_pixels,
    max_processing_s: decoding.MaxProcessingS = 30.0,
    max_processing_memory_gb: decoding.MaxProcessingGb = 4.0,
    processor: _Processor = "auto",
    api_key: _ApiKey = None,
    api_keys_file: _ApiKeysFile = None,
    metrics_port: _MetricsPort = None,
) -> None:
    """Start a frontend: OpenAI's API over HTTP, without a GPU."""
    import uvloop

    from semel.assemble import FrontendOptions, run_frontend
    from semel.frontend.exchange import BodyLimits
    from semel.frontend.pace import PaceLimits
    from semel.frontend.roster import sources_of
    from semel.media import DecodeLimits
    from semel.media.budget import BudgetLimits
    from semel.media.download import FetchLimits
    from semel.media.fetch import FetchOptions
    from semel.media.policy import MediaPolicy
    from semel.processing.cores import usable_cores
    from semel.settings import read_api_keys, read_key

    _log_to_stderr()
    options = FrontendOptions(
        model=model,
        workers=worker or (),
        key=read_key(key_file),
        host=host,
        port=port,
        chat_template=chat_template,
        processes=processes or usable_cores(),
        body=BodyLimits(max_body_bytes, max_body_values, max_body_s),
        budget=BudgetLimits(max_request_media_bytes, max_media_bytes_in_flight, max_waiting_requests),
        pace=PaceLimits(max_refusals_per_s),
        cache_kind=feature_cache,
        cache_bytes=int(feature_cache_gb * 1024**3),
        processor=processor,
        fetching=FetchOptions(
            MediaPolicy.of(
                domains=allowed_media_domains or (),
                allow_http=allow_media_http,
                networks=allowed_media_networks or (),
                local_path=allowed_local_media_path,
            ),
            FetchLimits(max_bytes=max_media_bytes, total_s=media_timeout_s),
            int(media_cache_gb * 1024**3),
        ),
        limits=DecodeLimits(
            max_image_pixels=max_image_pixels,
            min_image_side=min_image_side,
            max_audio_s=max_audio_s,
            max_audio_channels=max_audio_channels,
            max_video_s=max_video_s,
            max_video_frames=max_video_frames,
            max_video_pixels=max_video_pixels,
        ),
        max_processing_s=max_processing_s,
        max_processing_bytes=int(max_processing_memory_gb * 1024**3),
        api_keys=read_api_keys(api_keys_file, api_key or ()),
        metrics_port=metrics_port,
        sources=sources_of(workers_file, workers_dns or (), workers_dns_s),
    )
    uvloop.run(run_frontend(options))


_OF_MANY: Final = ("worker", "workers_file", "workers_dns", "workers_dns_s")


@app.command(context_settings=_FLAGS)
@takes_flags_of(frontend, but=("model", "key_file", "host", "port", *_OF_MANY))
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


@app.command()
def top(
    url: Annotated[list[str], typer.Argument(help="Where frontends and workers serve /metrics; one or more.")] = [  # noqa: B006
        "http://127.0.0.1:8000"
    ],
    every_s: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
    svg: Annotated[Path | None, typer.Option(help="Draw one page to this SVG file, and end.")] = None,
) -> None:
    """Show what a fleet is doing: traffic, hit rates, bytes saved, latency by stage, workers."""
    from semel.cli.top import save, watch

    if svg is not None:
        save(url, svg, every_s=every_s)
        return
    with contextlib.suppress(KeyboardInterrupt):
        watch(url, every_s=every_s, console=console)


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
