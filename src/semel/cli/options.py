"""Flags that several commands take, each with its help: declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

import typer

__all__ = [
    "DRAIN_S",
    "FLAGS",
    "MIB",
    "ApiKey",
    "ApiKeysFile",
    "CacheGb",
    "CacheKind",
    "ChatTemplate",
    "DrainS",
    "Host",
    "KeepAlive",
    "KeyFile",
    "Listen",
    "LogFormat",
    "MaxBody",
    "MaxBodyS",
    "MaxBodyValues",
    "MaxMediaInFlight",
    "MaxRefusals",
    "MaxRequestMedia",
    "MaxRequests",
    "MaxTenantRequests",
    "MaxWaiting",
    "MetricsPort",
    "Model",
    "NoAccessLog",
    "Planning",
    "Port",
    "Processes",
    "Processor",
    "Rate",
    "RequestTimeout",
    "ShipResident",
    "Traces",
]

MIB: Final = 1024**2


FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}
Model = Annotated[str, typer.Argument(help="A model folder, or a model's name on the hub.")]
Host = Annotated[str, typer.Option(help="The address to serve at.")]
Port = Annotated[int, typer.Option(help="The port to serve at.")]
KeyFile = Annotated[Path, typer.Option(help="The fleet key (`semel key FILE` makes one).")]
ChatTemplate = Annotated[str | None, typer.Option(help="A chat template: a file, or Jinja itself.")]
Processes = Annotated[int | None, typer.Option(min=1, help="Preprocessing processes; one per core unless given.")]
MaxBody = Annotated[int, typer.Option(min=1, help="The largest body of a request, in bytes.")]
MaxBodyValues = Annotated[int, typer.Option(min=1, help="The most values in the JSON of a request.")]
MaxBodyS = Annotated[float, typer.Option(min=0.001, help="The longest that a body may take to come, in seconds.")]
MaxRequestMedia = Annotated[
    int, typer.Option(min=1, help="Bytes that one request may bring: its body, decoded media, fetched media.")
]
MaxMediaInFlight = Annotated[
    int, typer.Option(min=1, help="Bytes that all requests together may hold until their answers begin.")
]
MaxRefusals = Annotated[
    float,
    typer.Option(min=0, help="Refusals a second to one tenant; more of them wait, 5 s at most. 0: none waits."),
]
MaxWaiting = Annotated[int, typer.Option(min=1, help="Requests that may wait for their answers to begin.")]
CacheKind = Annotated[
    Literal["shared", "lru"], typer.Option(help="Where features are kept: in shared memory, or in the process.")
]
CacheGb = Annotated[float, typer.Option(help="GiB for them; 0 keeps none.")]
Processor = Annotated[
    Literal["auto", "hf", "vllm"],
    typer.Option(
        help="Where features come from, the same on every worker and frontend: the model's HF processor, or vLLM's; "
        "auto takes the former for families that semel knows."
    ),
]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(help="A key that clients must send; may be given several times. Others see it in `ps`."),
]
ApiKeysFile = Annotated[
    Path | None, typer.Option(help="A file of keys, a line `TENANT KEY` for each: tenants share nothing.")
]
MetricsPort = Annotated[
    int | None, typer.Option(help="Serve /metrics at this port of 127.0.0.1 too; with API keys, only there.")
]
LogFormat = Annotated[
    Literal["text", "json"], typer.Option(help="How the log looks: lines of text, or one JSON object a line.")
]
Traces = Annotated[
    str | None,
    typer.Option(help="Send OpenTelemetry spans to this URL, http://HOST:4318/v1/traces. Needs `semel[otel]`."),
]
NoAccessLog = Annotated[
    bool, typer.Option("--disable-uvicorn-access-log", help="Log no line for each request that is answered.")
]
Listen = Annotated[str, typer.Option(help="ipc:///DIRECTORY/NAME, or tcp://HOST:PORT (encrypted).")]
DrainS = Annotated[
    float, typer.Option(min=0, help="Seconds for running requests when it is stopped; a second signal ends it at once.")
]
DRAIN_S: Final = 25.0
"""Kubernetes gives a pod 30 s to end: so it ends by itself, and leaves nothing behind."""

MaxRequests = Annotated[int, typer.Option(min=1, help="Requests in flight, streams included; over it 429.")]
MaxTenantRequests = Annotated[
    int, typer.Option(min=0, help="The same for each tenant of the API keys; 0: no bound of its own.")
]
RequestTimeout = Annotated[
    float, typer.Option(min=0, help="The longest that a request may take, answer included, in seconds; 0: for ever.")
]
KeepAlive = Annotated[float, typer.Option(min=0.001, help="Seconds after which an idle connection is closed.")]
Rate = Annotated[float, typer.Option(min=0.01, help="Tokens a second for each request.")]
Planning = Annotated[bool, typer.Option("--encoder-planning", help="Let semel plan vLLM's encoder as well.")]
ShipResident = Annotated[
    bool, typer.Option("--ship-resident-items", help="Send the engine's processes also items that nothing will encode.")
]
