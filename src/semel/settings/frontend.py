"""Settings of a frontend: what `semel frontend` takes, in sections that other commands share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from semel.cells.settings import CellSettings
from semel.core.flag import GIB, MAX_PORT, REQUIRED, flag, section
from semel.errors import ConfigError
from semel.fleet.ejection import EjectionLimits
from semel.frontend.limits import BodyLimits, BudgetLimits, ConcurrencyLimits, CorsSettings, RefusalLimits
from semel.media.decode.limits import DecodeLimits, DocumentLimits, ProcessingLimits
from semel.media.fetch.settings import FetchSettings
from semel.store.settings import MediaStoreSettings
from semel.web.limits import ConnectionLimits
from semel.web.peers import PeerSettings
from semel.web.tls import TlsSettings

__all__ = [
    "ApiKeySettings",
    "CacheKind",
    "CacheSettings",
    "DiscoverySettings",
    "FrontendSettings",
    "LogSettings",
    "PreprocessingSettings",
    "ServerSettings",
    "ServingSettings",
    "StartSettings",
]

CacheKind = Literal["shared", "lru"]


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The address of a server, its chat template, and its draining."""

    host: str = flag("127.0.0.1", help="Address to listen on.", group="Server", is_common=True)
    port: int = flag(8000, help="Port to listen on.", group="Server", is_common=True, min=0, max=MAX_PORT)
    chat_template: str | None = flag(
        None,
        help="Chat template: a file, or Jinja text.",
        group="Server",
        is_common=True,
        default_text="the model's own",
    )
    chat_template_content_format: Literal["auto", "openai", "string"] = flag(
        "auto",
        help="Content that the chat template gets: a list of parts (openai) or one string. auto finds out from the "
        "template.",
        group="Server",
    )
    root_path: str | None = flag(
        None, help="Path prefix of a proxy that forwards it: /PREFIX/v1/models is /v1/models.", group="Server"
    )
    drain_s: float = flag(
        25.0,
        help="Seconds for running requests to finish after SIGTERM or Ctrl-C; a second signal ends at once.",
        group="Draining",
        is_common=True,
        unit="seconds",
        min=0,
    )
    """Kubernetes gives a pod 30 s to end: so it ends by itself, and leaves nothing behind."""

    @property
    def content_format(self) -> Literal["openai", "string"] | None:
        """The content format that the operator has chosen; None leaves it to the template."""
        return None if self.chat_template_content_format == "auto" else self.chat_template_content_format


@dataclass(frozen=True, slots=True)
class DiscoverySettings:
    """The sources of a frontend's workers."""

    workers: tuple[str, ...] = flag(
        (),
        "worker",
        help="Addresses of workers: ipc:///DIRECTORY/NAME or tcp://HOST:PORT.",
        group="Fleet",
        is_common=True,
    )
    workers_file: Path | None = flag(
        None,
        "worker-file",
        help="File of worker addresses, one per line; changes are picked up within a second.",
        group="Fleet",
        is_common=True,
    )
    workers_dns: tuple[str, ...] = flag(
        (),
        "worker-dns",
        help="NAME:PORT; every address that DNS has for the name is a worker, over tcp.",
        group="Fleet",
        is_common=True,
    )
    workers_dns_s: int = flag(
        10, "worker-dns-interval-s", help="Seconds between DNS lookups.", group="Fleet", unit="seconds", min=1
    )
    workers_slices: tuple[str, ...] = flag(
        (),
        "worker-endpoint-slices",
        help="NAMESPACE/SERVICE[:PORT] in Kubernetes: every ready pod in its EndpointSlices is a worker, over "
        "tcp. PORT is a number or a name.",
        group="Fleet",
        is_common=True,
    )


@dataclass(frozen=True, slots=True)
class ApiKeySettings:
    """The keys of clients."""

    api_keys: tuple[str, ...] = flag(
        (),
        "api-key",
        help="Keys that clients must send, one or more. Other users of this machine can see them in `ps`; "
        "VLLM_API_KEY in the environment is one too if there is neither this flag nor --api-keys-file.",
        group="Keys",
        is_common=True,
        is_secret=True,
    )
    api_keys_file: Path | None = flag(
        None,
        help="File of keys, one line `TENANT KEY` for each; tenants share no cached data. KEY may be the key's hash, "
        "sha256:HEX. Changes are picked up within a second.",
        group="Keys",
        is_common=True,
    )
    priority_tenants: tuple[str, ...] = flag(
        (),
        "priority-tenant",
        help="Tenants whose requests may set `priority`. Without API keys every request may.",
        group="Keys",
    )
    adapter_tenants: tuple[str, ...] = flag(
        (),
        "adapter-tenants",
        help="ADAPTER=TENANT[,TENANT...]: who may use a LoRA adapter. For other tenants it is not there. One that is "
        "not named is for all.",
        group="Keys",
    )

    def tenants_by_adapter(self) -> dict[str, frozenset[str]]:
        """Return who may use an adapter. Raises `ConfigError` for a line that says it otherwise."""
        found: dict[str, frozenset[str]] = {}
        for one in self.adapter_tenants:
            adapter, _, names = one.partition("=")
            tenants = frozenset(name.strip() for name in names.split(","))
            if not adapter or "" in tenants or adapter in found:
                raise ConfigError(f"--adapter-tenants {one}: write ADAPTER=TENANT,TENANT, each adapter once")
            found[adapter] = tenants
        return found


@dataclass(frozen=True, slots=True)
class PreprocessingSettings:
    """The preprocessing processes of a frontend."""

    processes: int | None = flag(
        None,
        "preprocessing-processes",
        help="Number of preprocessing processes.",
        group="Preprocessing",
        is_common=True,
        min=1,
        default_text="one per core",
    )
    processor: Literal["auto", "hf", "vllm"] = flag(
        "auto",
        help="Preprocessor: the model's own from Hugging Face (hf), or vLLM's. auto takes hf for the model families "
        "that semel knows. All frontends and workers must use the same.",
        group="Preprocessing",
        is_common=True,
    )
    trust_remote_code: bool = flag(
        False,
        help="Run code from the model folder, as vLLM does with this flag. Every worker and frontend needs it.",
        group="Preprocessing",
        is_common=True,
    )
    require_sandbox: bool = flag(
        False,
        help="Refuse to start if the kernel lacks a layer of the sandbox for preprocessing (Landlock, "
        "seccomp). Without the flag, the log says what is missing.",
        group="Preprocessing",
    )
    limits: ProcessingLimits = section(ProcessingLimits)


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The feature cache of a frontend."""

    kind: CacheKind = flag(
        "shared",
        "feature-cache",
        help="Where preprocessed items are cached: in shared memory, or inside the process (lru).",
        group="Caches",
    )
    capacity_bytes: int = flag(
        GIB,
        "feature-cache-gb",
        help="Size of the cache for preprocessed items, in GiB; 0 turns it off.",
        group="Caches",
        is_common=True,
        unit="GiB",
        min=0,
    )


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Logs and traces of a process."""

    log_format: Literal["text", "json"] = flag(
        "text",
        help="Log format: lines of text, or one JSON object per line.",
        group="Logs, metrics and traces",
        is_common=True,
    )
    otlp_traces_endpoint: str | None = flag(
        None,
        help="Send OpenTelemetry spans to this URL, http://HOST:4318/v1/traces. Needs `semel[otel]`.",
        group="Logs, metrics and traces",
        is_common=True,
    )


@dataclass(frozen=True, slots=True)
class StartSettings:
    """The start of a command."""

    config: Path | None = flag(
        None,
        help="YAML file of flags, semel's and vLLM's, by name without dashes; the command line counts more.",
        group="Server",
        is_common=True,
    )
    skip_checks: bool = flag(
        False,
        help="Start without checking the model, flags, keys, ports and memory first.",
        group="Server",
    )


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """All of a frontend but its model, its fleet key and its workers."""

    server: ServerSettings = section(ServerSettings)
    tls: TlsSettings = section(TlsSettings)
    peers: PeerSettings = section(PeerSettings)
    keys: ApiKeySettings = section(ApiKeySettings)
    fetch: FetchSettings = section(FetchSettings)
    media_store: MediaStoreSettings = section(MediaStoreSettings)
    decode: DecodeLimits = section(DecodeLimits)
    documents: DocumentLimits = section(DocumentLimits)
    preprocessing: PreprocessingSettings = section(PreprocessingSettings)
    body: BodyLimits = section(BodyLimits)
    budget: BudgetLimits = section(BudgetLimits)
    concurrency: ConcurrencyLimits = section(ConcurrencyLimits)
    refusals: RefusalLimits = section(RefusalLimits)
    cors: CorsSettings = section(CorsSettings)
    unknown_fields: Literal["warn", "refuse", "ignore"] = flag(
        "warn",
        help="What to do with top-level fields of a request that its API does not have: ignore them and warn (a "
        "response header, a metric and a log line), refuse them with 400, or ignore them. A near miss of a field that "
        "the API has is refused unless all are ignored.",
        group="Server",
    )
    connections: ConnectionLimits = section(ConnectionLimits)
    cache: CacheSettings = section(CacheSettings)
    cell: CellSettings = section(CellSettings)
    logs: LogSettings = section(LogSettings)
    disable_access_log: bool = flag(
        False,
        "disable-uvicorn-access-log",
        help="Do not log a line for each request.",
        group="Logs, metrics and traces",
    )
    metrics_port: int | None = flag(
        None,
        help="Also serve /metrics, /health and /ready on this port. With API keys, /metrics is served only there.",
        group="Logs, metrics and traces",
        is_common=True,
        min=0,
        max=MAX_PORT,
    )
    metrics_host: str = flag(
        "127.0.0.1",
        help="Address of the metrics port, and of a worker's admin port for /metrics, /health and /ready alone. "
        "Metrics cover all tenants, and need no key.",
        group="Logs, metrics and traces",
    )
    disable_metrics_per_worker: bool = flag(
        False,
        help="Export metrics of workers only in total by state: each worker adds time series at every "
        "frontend. Alerts and panels that name workers stay empty then.",
        group="Logs, metrics and traces",
    )
    metrics_per_tenant: bool = flag(
        False,
        help="Also export metrics per tenant of the API keys: each tenant adds time series.",
        group="Logs, metrics and traces",
    )

    def media_stores(self) -> tuple[MediaStoreSettings, MediaStoreSettings | None, MediaStoreSettings | None]:
        """Return the settings of the stores of files, of fetched responses, and of responses to clients.

        Frontends share what they fetch if URLs are fetched and their responses are cached at all. Raises `ConfigError`
        if responses are to be stored, and there is no store.
        """
        stored = self.media_store
        if stored.location is None:
            if stored.store_responses:
                raise ConfigError("--store-responses needs a media store; name it with --media-store")
            return stored, None, None
        fetches = self.fetch.allowed_domains and self.fetch.cache_bytes
        used = {"fetched": bool(fetches), "responses": stored.store_responses}
        files, *parts = stored.parted(*(folder for folder, is_used in used.items() if is_used))
        remaining = iter(parts)
        fetched, responses = (next(remaining) if is_used else None for is_used in used.values())
        return files, fetched, responses


@dataclass(frozen=True, slots=True)
class FrontendSettings:
    """The settings of `semel frontend`."""

    model: str = flag(
        REQUIRED,
        help="A model folder, or a model's name on the Hugging Face hub.",
        group="Server",
        is_common=True,
        is_positional=True,
    )
    key_file: Path | None = flag(
        None,
        "fleet-key-file",
        help="File with the fleet key, which everything else is derived from; `semel key fleet FILE` makes one. Or use "
        "--key-dir.",
        group="Keys",
        is_common=True,
    )
    key_dir: Path | None = flag(
        None,
        help="Folder with this role's own keys, of `semel key make`. Transport keys are read again when they change.",
        group="Keys",
        is_common=True,
    )
    discovery: DiscoverySettings = section(DiscoverySettings)
    ejection: EjectionLimits = section(EjectionLimits)
    drain_delay_s: float = flag(
        5.0,
        help="Seconds after SIGTERM or Ctrl-C in which /ready fails and requests are still accepted, so that "
        "load balancers stop sending in time. Draining follows.",
        group="Draining",
        unit="seconds",
        min=0,
    )
    serving: ServingSettings = section(ServingSettings)
    start: StartSettings = section(StartSettings)
