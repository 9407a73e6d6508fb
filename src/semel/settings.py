"""Settings that come from outside the code: files, flags, the environment. The only place that reads them.

Each component declares its own section, beside it; what is here belongs to a process as a whole, and puts the sections
together into what a command takes. Light to import: the command line is made from it.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from semel.cells.settings import CellSettings
from semel.core import Key, Keyring
from semel.core.flag import GIB, MAX_PORT, REQUIRED, flag, same_flag, section
from semel.core.keyring import MIN_KEY_CHARS, hash_key, is_hashed, is_sendable
from semel.embeddings.settings import EmbeddingStoreSettings
from semel.engine.progress import ProgressLimits
from semel.engine.vllm.grammars.limits import GrammarLimits
from semel.errors import ConfigError
from semel.fleet.ejection import EjectionLimits
from semel.frontend.limits import BodyLimits, BudgetLimits, ConcurrencyLimits, CorsSettings, RefusalLimits
from semel.media.decode.limits import DecodeLimits, ProcessingLimits
from semel.media.fetch.settings import FetchSettings
from semel.store.settings import MediaStoreSettings
from semel.web.limits import ConnectionLimits
from semel.web.peers import PeerSettings
from semel.web.tls import TlsSettings
from semel.worker.session_settings import SessionSettings

if TYPE_CHECKING:
    from semel.embeddings.nodes import Nodes
    from semel.fleet.kubernetes_api import KubernetesApi
    from semel.telemetry.tracing import Collector
    from semel.wire.keys import TransportKeys
    from semel.wire.proof import Role

__all__ = [
    "SERVICE_NAME",
    "TRACES_PROTOCOL",
    "AdminSettings",
    "ApiKeySettings",
    "CacheKind",
    "CacheSettings",
    "DiscoverySettings",
    "EncoderSettings",
    "FrontendSettings",
    "LogSettings",
    "PreprocessingSettings",
    "ServeSettings",
    "ServerSettings",
    "ServingSettings",
    "StartSettings",
    "TurnSettings",
    "WorkerSettings",
    "api_key_warnings",
    "create_key",
    "default_folder",
    "default_variable",
    "embedding_store",
    "embedding_store_nodes",
    "has_api_keys",
    "is_tenant",
    "kubernetes_api",
    "read_admin_key",
    "read_api_keys",
    "read_key",
    "read_transport_keys",
    "run_folder",
    "tenant_key",
    "trace_collector",
]

SERVICE_NAME: Final = "OTEL_SERVICE_NAME"
TRACES_PROTOCOL: Final = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"

_DEFAULT_TENANT: Final = "default"
_VLLM_KEY: Final = "VLLM_API_KEY"
_TENANT: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")

_SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")

_REMOVE_FOLDER: Final = """
import os, shutil, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.stdin.buffer.read()
for _ in range(20):
    if not os.path.exists(sys.argv[1]):
        break
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    time.sleep(0.5)
"""
"""Waits until nobody has the other end of its pipe. Those who end later may still write into the folder for a while."""

CacheKind = Literal["shared", "lru"]


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where a server is, and how it ends."""

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
    """Where a frontend finds its workers."""

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


@dataclass(frozen=True, slots=True)
class PreprocessingSettings:
    """Who preprocesses, and with what."""

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
    """What a process tells its operator."""

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
    """How a command starts."""

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


@dataclass(frozen=True, slots=True)
class FrontendSettings:
    """What `semel frontend` takes."""

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


@dataclass(frozen=True, slots=True)
class AdminSettings:
    """The admin address of a worker."""

    admin_port: int | None = flag(
        None,
        help="Serve metrics, probes, feature injection and cache reset on this port. The last two answer on 127.0.0.1 "
        "only.",
        group="Admin",
        is_common=True,
        min=0,
        max=MAX_PORT,
    )
    admin_key_file: Path | None = flag(
        None,
        help="File with the key for injection and reset, at least 16 printable characters. Without it, and without "
        "admin.key in --key-dir, the admin port serves metrics only.",
        group="Admin",
    )


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """Which of semel's parts a worker's engine runs with."""

    encoder_planning: bool = flag(
        False, help="Let semel schedule the encoder instead of vLLM's scheduler.", group="Encoder cache"
    )
    ship_resident_items: bool = flag(
        False,
        "disable-lazy-mm-transfer",
        help="Send image and audio data to the engine's processes even if it is already encoded there, as vLLM does.",
        group="Encoder cache",
    )
    encoder_cache_embeddings: int | None = flag(
        None,
        help="Size of the encoder cache on the engine's device, in embeddings. The worker logs the memory that "
        "it takes.",
        group="Encoder cache",
        is_common=True,
        min=1,
        default_text="vLLM's own: --max-num-batched-tokens",
    )
    embedding_tier_bytes: int = flag(
        0,
        "embedding-tier-gb",
        help="Host memory for encoder outputs that the device has no room for, in GiB; 0 turns it off.",
        group="Encoder cache",
        is_common=True,
        unit="GiB",
        min=0,
    )
    store: EmbeddingStoreSettings = section(EmbeddingStoreSettings)


@dataclass(frozen=True, slots=True)
class TurnSettings:
    """How tenants share a worker's engine."""

    disable_tenant_turns: bool = flag(
        False,
        help="Pass requests to the engine in order of arrival instead of by fair queueing over tenants.",
        group="Worker",
    )


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What `semel worker` takes besides vLLM's flags."""

    model: str = same_flag(FrontendSettings, "model")
    listen: str = flag(
        REQUIRED,
        help="Address to listen on: ipc:///DIRECTORY/NAME, or tcp://HOST:PORT (encrypted).",
        group="Fleet",
        is_common=True,
    )
    key_file: Path | None = same_flag(FrontendSettings, "key_file")
    key_dir: Path | None = same_flag(FrontendSettings, "key_dir")
    drain_delay_s: float = same_flag(FrontendSettings, "drain_delay_s")
    drain_s: float = same_flag(ServerSettings, "drain_s")
    processor: Literal["auto", "hf", "vllm"] = same_flag(PreprocessingSettings, "processor")
    trust_remote_code: bool = same_flag(PreprocessingSettings, "trust_remote_code")
    admin: AdminSettings = section(AdminSettings)
    metrics_host: str = same_flag(ServingSettings, "metrics_host")
    encoder: EncoderSettings = section(EncoderSettings)
    turns: TurnSettings = section(TurnSettings)
    grammars: GrammarLimits = section(GrammarLimits)
    progress: ProgressLimits = section(ProgressLimits)
    cell: CellSettings = section(CellSettings)
    sessions: SessionSettings = section(SessionSettings)
    logs: LogSettings = section(LogSettings)
    start: StartSettings = section(StartSettings)


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What `semel serve` takes besides vLLM's flags."""

    model: str = same_flag(FrontendSettings, "model")
    key_file: Path | None = flag(
        None, "fleet-key-file", help="File with the fleet key.", group="Keys", default_text="a new key for this run"
    )
    key_dir: Path | None = flag(
        None, help="Folder with the keys of both roles, of `semel key make`, instead of a fleet key.", group="Keys"
    )
    drain_delay_s: float = same_flag(FrontendSettings, "drain_delay_s", default=0.0)
    workers: int = flag(
        1,
        help="Number of workers. The GPUs of this machine, or without any its cores, are split among them.",
        group="Server",
        is_common=True,
        min=1,
    )
    verbose: bool = flag(
        False, help="At a terminal, show everything that the processes print while they start.", group="Server"
    )
    start: StartSettings = section(StartSettings)
    serving: ServingSettings = section(ServingSettings)
    admin: AdminSettings = section(AdminSettings)
    encoder: EncoderSettings = section(EncoderSettings)
    turns: TurnSettings = section(TurnSettings)
    grammars: GrammarLimits = section(GrammarLimits)
    progress: ProgressLimits = section(ProgressLimits)
    sessions: SessionSettings = section(SessionSettings)


def trace_collector(endpoint: str | None) -> Collector | None:
    """Where spans go, and how: over HTTP unless the environment says otherwise, under OpenTelemetry's own names."""
    from semel.telemetry.tracing import Collector

    if endpoint is None:
        return None
    protocol = os.environ.get(TRACES_PROTOCOL) or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    return Collector.of(endpoint, protocol)


def kubernetes_api() -> KubernetesApi:
    """The API server of the cluster that this pod is in."""
    from semel.fleet.kubernetes_api import KubernetesApi

    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigError(
            "--worker-endpoint-slices needs a pod of Kubernetes: KUBERNETES_SERVICE_HOST is not set; name workers by "
            "--worker, --worker-file or --worker-dns elsewhere"
        )
    url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return KubernetesApi(url, _SERVICE_ACCOUNT / "token", _SERVICE_ACCOUNT / "ca.crt")


@contextmanager
def default_variable(name: str, value: str) -> Iterator[None]:
    """Let a variable of the environment have a value for a while, unless it has one; children are told of it."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


@contextmanager
def default_folder(name: str) -> Iterator[None]:
    """Let a variable of the environment name a folder for a while, unless it has a value; children are told of it."""
    if name in os.environ:
        yield
        return
    with run_folder() as folder, default_variable(name, str(folder)):
        yield


@contextmanager
def run_folder() -> Iterator[Path]:
    """Make a folder that only this user can read, for sockets and a key; it goes with this process, also if killed."""
    folder = Path(tempfile.mkdtemp(prefix="semel-"))
    command = (sys.executable, "-I", "-S", "-c", _REMOVE_FOLDER, str(folder))
    try:
        with subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0
        ):
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def create_key(path: Path) -> Key:
    """Make a fleet key and store it where only its owner can read it; a file that is there is never replaced."""
    key = Key(secrets.token_bytes(32))
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stat.S_IRUSR | stat.S_IWUSR)
    except FileExistsError:
        raise ConfigError(f"{path} exists; a fleet key is never overwritten: name another file") from None
    except OSError as error:
        raise ConfigError(f"cannot write the key file {path}: {error.strerror}") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(key.secret.hex() + "\n")
    return key


def read_key(path: Path) -> Key:
    """A fleet key from a key file: 64 hexadecimal digits, which nobody else can read."""
    text = _read_secret(path, remedy=f"`semel key fleet {path}` makes one")
    try:
        return Key(bytes.fromhex(text))
    except ValueError:
        raise ConfigError(f"{path} is not a key file: it needs 64 hexadecimal digits") from None


def read_transport_keys(path: Path, role: Role) -> TransportKeys:
    """One role's transport keys from a file of `semel key make`, which nobody else can read."""
    from semel.wire.zmq.address import transport_keys
    from semel.wire.zmq.key_pairs import decode_keys

    text = _read_secret(path, remedy="`semel key make DIR` makes one")
    try:
        keys = decode_keys(text)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be used: {error}; `semel key make DIR` makes one") from None
    return transport_keys(keys, role)


def read_admin_key(path: Path) -> str:
    """The key of a worker's admin address: any printable text, which nobody else can read."""
    return _read_secret(path, remedy="write at least 16 random characters into it")


def embedding_store_nodes(store: EmbeddingStoreSettings) -> Nodes | None:
    """The nodes of the embedding store; None if the settings name none. Nothing is connected yet."""
    from semel.embeddings.nodes import open_nodes

    if store.locations is None:
        return None
    path = store.password_file
    password = None if path is None else _read_secret(path, remedy="write the embedding store's password into it")
    if password == "":
        raise ConfigError(f"{path} is empty; write the embedding store's password into it")
    return open_nodes(store, password)


def embedding_store(encoder: EncoderSettings) -> Nodes | None:
    """The same for a worker, whose host tier must have room for what comes from the store."""
    encoder.store.check_tier(encoder.embedding_tier_bytes)
    return embedding_store_nodes(encoder.store)


def read_api_keys(settings: ApiKeySettings) -> Keyring:
    """The keys of clients: those given, of one tenant, and those of a file that nobody else can read.

    A key of a flag or of the environment may be short, as with vLLM; `api_key_warnings` says so.
    """
    keys = []
    for key in _given_keys(settings):
        if not is_sendable(key):
            raise ConfigError(
                "API keys: a key of --api-key or VLLM_API_KEY is empty, or has a blank or a character that is not "
                "printable ASCII; no client could send it"
            )
        keys.append((_DEFAULT_TENANT, key if is_hashed(key) else hash_key(key)))
    if settings.api_keys_file is not None:
        keys += _tenant_keys(settings.api_keys_file)
    try:
        return Keyring(keys)
    except ValueError as error:
        raise ConfigError(f"API keys: {error}") from None


def api_key_warnings(settings: ApiKeySettings) -> Iterator[str]:
    """Warn of keys that are easy to guess, and of one that is not used. No key is shown."""
    short = [len(key) for key in _given_keys(settings) if len(key) < MIN_KEY_CHARS]
    if short:
        yield (
            f"an API key has {min(short)} characters: use {MIN_KEY_CHARS} or more random ones, which cannot be guessed"
        )
    if os.environ.get(_VLLM_KEY) and settings.api_keys_file is not None and not settings.api_keys:
        yield f"{_VLLM_KEY} is set and not used: --api-keys-file has the keys"


def has_api_keys(settings: ApiKeySettings) -> bool:
    """Whether clients need a key."""
    return settings.api_keys_file is not None or bool(_given_keys(settings))


def _given_keys(settings: ApiKeySettings) -> tuple[str, ...]:
    """The keys of flags; without any, and without a file of keys, that of vLLM's variable."""
    variable = os.environ.get(_VLLM_KEY)
    if settings.api_keys or settings.api_keys_file is not None or not variable:
        return settings.api_keys
    return (variable,)


def is_tenant(text: str) -> bool:
    """Whether a text can be the name of a tenant."""
    return _TENANT.fullmatch(text) is not None


def tenant_key(line: str) -> tuple[str, str] | None:
    """The tenant of a line of an API keys file, and its key or the hash of it; None if the line has none."""
    if not (fields := line.partition("#")[0].split()):
        return None
    if len(fields) != 2 or not is_tenant(fields[0]):
        raise ValueError("must be a tenant of letters, digits, '.', '_' and '-', and its key")
    return fields[0], fields[1]


def _tenant_keys(path: Path) -> list[tuple[str, str]]:
    remedy = "write a line `TENANT KEY` into it for each of them"
    keys = []
    for number, line in enumerate(_read_secret(path, remedy=remedy).splitlines(), 1):
        try:
            found = tenant_key(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        if found is not None:
            keys.append(found)
    if not keys:
        raise ConfigError(f"{path} has no keys; {remedy}")
    return keys


def _read_secret(path: Path, *, remedy: str) -> str:
    """The text of a key file; the `remedy` says how to make one that is not there."""
    try:
        with path.open(encoding="ascii") as file:
            status = os.fstat(file.fileno())
            text = file.read().strip()
    except FileNotFoundError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror}; {remedy}") from error
    except OSError as error:
        raise ConfigError(
            f"cannot read the key file {path}: {error.strerror or 'the system gives no reason'}"
        ) from error
    except UnicodeDecodeError as error:
        # Not the error's own words: they have a byte of the secret.
        raise ConfigError(
            f"cannot read the key file {path}: it has other characters than ASCII, the first at byte {error.start:,}"
        ) from None
    if not _is_private(status):
        raise ConfigError(f"{path} can be read by others; `chmod 600 {path}`, or 0440 with root as its owner")
    return text


def _is_private(status: os.stat_result) -> bool:
    """Whether a file is its owner's alone, or root's and readable by a group of ours: so Kubernetes mounts secrets."""
    if not (others := status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)):
        return True
    is_ours = status.st_gid in {os.getegid(), *os.getgroups()}
    return others == stat.S_IRGRP and status.st_uid == 0 and is_ours
