"""The commands and what they take."""

from __future__ import annotations

import contextlib
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from semel.cli import decoding, fetching
from semel.cli.benches import bench
from semel.cli.flags import as_arguments, takes_flags_of
from semel.cli.options import (
    DRAIN_S,
    FLAGS,
    MIB,
    ApiKey,
    ApiKeysFile,
    CacheGb,
    CacheKind,
    ChatTemplate,
    DrainS,
    Host,
    KeepAlive,
    KeyFile,
    Listen,
    LogFormat,
    MaxBody,
    MaxBodyS,
    MaxBodyValues,
    MaxMediaInFlight,
    MaxRefusals,
    MaxRequestMedia,
    MaxRequests,
    MaxTenantRequests,
    MaxWaiting,
    MetricsPort,
    Model,
    NoAccessLog,
    Planning,
    Port,
    Processes,
    Processor,
    Rate,
    RequestTimeout,
    ShipResident,
    Traces,
)
from semel.cli.sizing import size

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
app.add_typer(bench, name="bench")
app.command()(size)

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


def frontend(
    model: Model,
    key_file: KeyFile,
    worker: Annotated[list[str] | None, typer.Option(help="Where a worker listens; once for each of them.")] = None,
    workers_file: Annotated[
        Path | None, typer.Option(help="A file of such addresses, one in a line; it is watched.")
    ] = None,
    workers_dns: Annotated[
        list[str] | None, typer.Option(help="NAME:PORT: a worker listens at each address of the name, over tcp.")
    ] = None,
    workers_dns_s: Annotated[int, typer.Option(min=1, help="Seconds between two looks at DNS.")] = 10,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    chat_template: ChatTemplate = None,
    processes: Processes = None,
    max_body_bytes: MaxBody = 256 * MIB,
    max_body_values: MaxBodyValues = 262_144,
    max_body_s: MaxBodyS = 120.0,
    max_request_media_bytes: MaxRequestMedia = 512 * MIB,
    max_media_bytes_in_flight: MaxMediaInFlight = 2_048 * MIB,
    max_waiting_requests: MaxWaiting = 2_048,
    max_refusals_per_s: MaxRefusals = 20.0,
    max_requests: MaxRequests = 4_096,
    max_tenant_requests: MaxTenantRequests = 0,
    request_timeout_s: RequestTimeout = 0.0,
    keep_alive_s: KeepAlive = 75.0,
    drain_s: DrainS = DRAIN_S,
    feature_cache: CacheKind = "shared",
    feature_cache_gb: CacheGb = 1.0,
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
    processor: Processor = "auto",
    api_key: ApiKey = None,
    api_keys_file: ApiKeysFile = None,
    metrics_port: MetricsPort = None,
    log_format: LogFormat = "text",
    otlp_traces_endpoint: Traces = None,
    disable_uvicorn_access_log: NoAccessLog = False,
) -> None:
    """Start a frontend: OpenAI's API over HTTP, without a GPU."""
    import uvloop

    from semel.compose import FrontendOptions, run_frontend
    from semel.fleet.discovery import sources_of
    from semel.frontend.budget import BudgetLimits
    from semel.frontend.http.body import BodyLimits
    from semel.frontend.middleware.concurrency import ConcurrencyLimits
    from semel.frontend.middleware.refusal_rate import RefusalLimits
    from semel.media import DecodeLimits
    from semel.media.fetch.download import FetchLimits
    from semel.media.fetch.fetch import FetchOptions
    from semel.media.fetch.policy import MediaPolicy
    from semel.processing.cores import usable_cores
    from semel.settings import read_api_keys, read_key, trace_collector
    from semel.telemetry.logs import log_to_stderr
    from semel.web.server import ConnectionLimits

    log_to_stderr(log_format)
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
        pace=RefusalLimits(max_refusals_per_s),
        gate=ConcurrencyLimits(max_requests, max_tenant_requests, request_timeout_s),
        connections=ConnectionLimits(keep_alive_s, headers_s=max_body_s, stall_s=max_body_s),
        drain_s=drain_s,
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
        collector=trace_collector(otlp_traces_endpoint),
        log_requests=not disable_uvicorn_access_log,
    )
    uvloop.run(run_frontend(options))


_OF_BOTH: Final = ("processor", "log_format", "otlp_traces_endpoint", "drain_s")
_OF_MANY: Final = ("worker", "workers_file", "workers_dns", "workers_dns_s")


@app.command(context_settings=FLAGS)
@takes_flags_of(frontend, but=("model", "key_file", "host", "port", *_OF_MANY))
def serve(
    context: typer.Context,
    model: Model,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    key_file: Annotated[
        Path | None, typer.Option(help="The fleet key; without one, a key is made for this run.")
    ] = None,
    **flags: object,
) -> None:
    """Serve a model on this machine: a worker and a frontend, kept alive. Takes every engine flag of vLLM."""
    from semel.cli.serve import ServeOptions, serve
    from semel.settings import trace_collector
    from semel.telemetry.tracing import check_installed

    endpoint = flags["otlp_traces_endpoint"]
    check_installed(trace_collector(None if endpoint is None else str(endpoint)))
    shared = as_arguments({name: flags[name] for name in _OF_BOTH})
    drain_s = float(str(flags["drain_s"]))
    options = ServeOptions(model, host, port, key_file, [*shared, *context.args], as_arguments(flags), drain_s)
    raise typer.Exit(serve(options))


@app.command(context_settings=FLAGS)
def worker(
    context: typer.Context,
    model: Model,
    listen: Listen,
    key_file: KeyFile,
    encoder_planning: Planning = False,
    ship_resident_items: ShipResident = False,
    admin_port: Annotated[
        int | None, typer.Option(help="Serve metrics, injection and reset at this port of 127.0.0.1.")
    ] = None,
    admin_key_file: Annotated[
        Path | None, typer.Option(help="The key for injection and reset: a file of 16 printable characters or more.")
    ] = None,
    drain_s: DrainS = DRAIN_S,
    processor: Processor = "auto",
    log_format: LogFormat = "text",
    otlp_traces_endpoint: Traces = None,
) -> None:
    """Start a worker: the process that embeds the engine. Takes every engine flag of vLLM."""
    import asyncio

    from semel.cli.engine_logs import engine_logs
    from semel.compose import WorkerOptions, run_worker
    from semel.settings import read_admin_key, read_key, trace_collector
    from semel.telemetry.logs import log_to_stderr

    log_to_stderr(log_format)
    key = read_key(key_file)
    admin_key = None if admin_key_file is None else read_admin_key(admin_key_file)
    options = WorkerOptions(
        model,
        listen,
        key,
        context.args,
        encoder_planning,
        admin_port,
        admin_key,
        drain_s,
        processor,
        trace_collector(otlp_traces_endpoint),
        ship_resident_items,
    )
    with engine_logs(log_format):
        asyncio.run(run_worker(options))


app.command()(frontend)


@app.command()
def doctor(
    model: Annotated[str | None, typer.Argument(help="A model folder to look at as well.")] = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
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


@testing.command("worker")
def rehearsal(
    model: Model,
    listen: Listen,
    key_file: KeyFile,
    rate: Rate = 20.0,
    phases: Annotated[int, typer.Option(min=1, help="Groups of requests that take turns; 1: all in one step.")] = 1,
    drain_s: DrainS = DRAIN_S,
    processor: Processor = "auto",
) -> None:
    """Start a worker whose engine has no model: numbered words at a steady rate. For trying all else."""
    import uvloop

    from semel.compose import WorkerOptions
    from semel.compose.modelless_worker import run_modelless_worker
    from semel.settings import read_key
    from semel.telemetry.logs import log_to_stderr

    log_to_stderr("text")
    options = WorkerOptions(model, listen, read_key(key_file), (), False, None, None, drain_s, processor)
    uvloop.run(run_modelless_worker(options, rate=rate, phases=phases))


@testing.command("serve")
@takes_flags_of(frontend, but=("model", "key_file", "host", "port", *_OF_MANY))
def rehearse(
    model: Model,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    rate: Rate = 20.0,
    **flags: object,
) -> None:
    """Serve a model without its engine: numbered words at a steady rate. For trying clients without weights."""
    from semel.cli.serve import ServeOptions, serve

    shared = as_arguments({name: flags[name] for name in ("processor", "drain_s")})
    worker_flags = [*shared, f"--rate={rate}"]
    frontend_flags, drain_s = as_arguments(flags), float(str(flags["drain_s"]))
    command = ("testing", "worker")
    raise typer.Exit(serve(ServeOptions(model, host, port, None, worker_flags, frontend_flags, drain_s, command)))
