"""All checks of a command, before it starts anything. Each is fast: nothing here imports torch or vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import get_args

from semel.cli.checks.engine_flags import EngineFlags, read_engine_flags
from semel.cli.checks.finding import Finding, problem_of
from semel.cli.checks.host import Endpoint, check_memory, check_ports, check_sandbox, check_shared_memory
from semel.cli.checks.model import check_chat_template, check_model
from semel.cli.placement import placements
from semel.core.flag import flags_of
from semel.core.keyring import MIN_KEY_CHARS
from semel.engine.vllm.compat.versions import check_release
from semel.errors import ConfigError
from semel.fleet.discovery import check_address
from semel.key_files import admin_key_file, process_keys
from semel.settings.frontend import ApiKeySettings, FrontendSettings, ServingSettings
from semel.settings.secrets import api_key_warnings, embedding_store, read_admin_key, read_api_keys
from semel.settings.serve import ServeSettings
from semel.settings.worker import AdminSettings, WorkerSettings
from semel.wire.proof import Role
from semel.wire.zmq.address import check_directory

__all__ = ["engine_findings", "frontend_findings", "key_warnings", "serve_findings", "worker_findings"]


def frontend_findings(settings: FrontendSettings) -> Iterator[Finding]:
    """Check what `semel frontend` is to start with."""
    serving = settings.serving
    yield from problem_of("fleet key", lambda: process_keys(settings.key_file, settings.key_dir, "frontend"))
    yield from _serving_findings(serving)
    for address in settings.discovery.workers:
        yield from _address_findings(address)
    yield from check_ports(_serving_ports(serving))
    made_by = serving.preprocessing
    yield from check_model(settings.model, trust_remote_code=made_by.trust_remote_code, processor=made_by.processor)
    yield from check_chat_template(Path(settings.model), serving.server.chat_template)


def worker_findings(settings: WorkerSettings, flags: Sequence[str]) -> Iterator[Finding]:
    """Check what `semel worker` is to start with. `flags` are vLLM's."""
    yield from problem_of("fleet key", lambda: process_keys(settings.key_file, settings.key_dir, "worker"))
    yield from _address_findings(settings.listen)
    yield from _listening_findings(settings.listen)
    yield from _admin_findings(admin_key_file(settings))
    yield from problem_of("embedding store", lambda: embedding_store(settings.encoder))
    yield from check_ports(_admin_ports(settings.admin, settings.metrics_host))
    read = read_engine_flags(flags, _spellings(WorkerSettings))
    yield from engine_findings(settings.model, read, trust_remote_code=settings.trust_remote_code)


def serve_findings(settings: ServeSettings, flags: Sequence[str]) -> Iterator[Finding]:
    """Check what `semel serve` is to start with. `flags` are vLLM's."""
    serving = settings.serving
    if settings.key_file is not None or settings.key_dir is not None:
        yield from problem_of("fleet key", lambda: _check_both(settings))
    yield from _serving_findings(serving)
    yield from _admin_findings(settings.admin.admin_key_file)
    yield from problem_of("embedding store", lambda: embedding_store(settings.encoder))
    ports = _admin_ports(settings.admin, serving.metrics_host, settings.workers)
    yield from check_ports([*_serving_ports(serving), *ports])
    read, trusts = read_engine_flags(flags, _spellings(ServeSettings)), serving.preprocessing.trust_remote_code
    yield from problem_of("devices", lambda: placements(settings.workers, read))
    yield from engine_findings(settings.model, read, trust_remote_code=trusts, workers=settings.workers)
    yield from check_chat_template(Path(settings.model), serving.server.chat_template)


def engine_findings(
    model: str, flags: EngineFlags, *, trust_remote_code: bool = False, workers: int = 1
) -> Iterator[Finding]:
    """Check an engine's flags, its model and its memory."""
    yield from problem_of("engine", check_release)
    yield from flags.problems
    yield from check_model(model, flags, trust_remote_code=trust_remote_code)
    yield check_shared_memory(flags, workers=workers)
    yield from check_memory(flags, workers=workers)


def _spellings(section: type) -> list[str]:
    return [one.spelling for one in flags_of(section) if not one.is_positional]


def _serving_ports(serving: ServingSettings) -> Iterator[Endpoint]:
    yield Endpoint(serving.server.host, serving.server.port)
    if serving.metrics_port is not None:
        yield Endpoint(serving.metrics_host, serving.metrics_port, "--metrics-port", "--metrics-host")


def _admin_ports(admin: AdminSettings, host: str, workers: int = 1) -> Iterator[Endpoint]:
    if admin.admin_port is not None:
        for number in range(workers if admin.admin_port else 1):
            yield Endpoint(host, admin.admin_port + number, "--admin-port", "--metrics-host")


def key_warnings(keys: ApiKeySettings) -> Iterator[Finding]:
    """Warn of clients' keys, whether or not the rest is checked."""
    return (Finding("API keys", "warning", text) for text in api_key_warnings(keys))


def _serving_findings(serving: ServingSettings) -> Iterator[Finding]:
    yield from problem_of("API keys", lambda: read_api_keys(serving.keys))
    yield from problem_of("adapters", serving.keys.tenants_by_adapter)
    yield from problem_of("TLS", serving.tls.context)
    yield from problem_of("proxies", lambda: serving.peers.proxies)
    yield from problem_of("media store", serving.media_stores)
    yield check_sandbox(required=serving.preprocessing.require_sandbox)


def _admin_findings(path: Path | None) -> Iterator[Finding]:
    if path is not None:
        yield from problem_of("admin key", lambda: _check_admin_key(path))


def _check_both(settings: ServeSettings) -> None:
    """Read the keys that `semel serve` hands to its children."""
    for role in get_args(Role):
        folder = None if settings.key_dir is None else settings.key_dir / role
        process_keys(settings.key_file, folder, role)


def _check_admin_key(path: Path) -> None:
    if (chars := len(read_admin_key(path))) < MIN_KEY_CHARS:
        raise ConfigError(f"the key in {path} has {chars} characters; write at least {MIN_KEY_CHARS} random ones")


def _address_findings(address: str) -> Iterator[Finding]:
    yield from problem_of("address", lambda: check_directory(check_address(address)))


def _listening_findings(address: str) -> Iterable[Finding]:
    """Report an address over tcp that a worker cannot listen at: taken, or not this machine's."""
    scheme, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    if scheme != "tcp" or not port.isdigit() or host == "*":
        return ()
    found = check_ports([Endpoint(host.strip("[]"), int(port), "--listen", "--listen")])
    return [one for one in found if one.verdict == "problem"]
