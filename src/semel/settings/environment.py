"""The environment of a process: its variables, and folders that go with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from semel.errors import ConfigError

if TYPE_CHECKING:
    from semel.fleet.kubernetes_api import KubernetesApi
    from semel.telemetry.tracing import Collector

__all__ = [
    "DEV_MODE",
    "SERVICE_NAME",
    "TRACES_PROTOCOL",
    "client_key",
    "default_folder",
    "default_variable",
    "is_dev_mode",
    "kubernetes_api",
    "run_folder",
    "shut_door",
    "trace_collector",
]

DEV_MODE: Final = "VLLM_SERVER_DEV_MODE"
"""The variable that has vLLM's server serve its routes for RL, and a worker at its admin address."""

SERVICE_NAME: Final = "OTEL_SERVICE_NAME"
TRACES_PROTOCOL: Final = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
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


def client_key() -> str | None:
    """Return the API key for a server: the one that vLLM's server and ours read, or the one of OpenAI's clients."""
    return os.environ.get("VLLM_API_KEY") or os.environ.get("OPENAI_API_KEY")


def is_dev_mode() -> bool:
    """Return whether vLLM's routes for RL are wanted; a `ConfigError` if the variable is no number."""
    presented = os.environ.get(DEV_MODE, "0")
    try:
        return bool(int(presented))
    except ValueError:
        raise ConfigError(f"{DEV_MODE} is {presented!r}: set it to 0 or 1") from None


def trace_collector(endpoint: str | None) -> Collector | None:
    """Return the collector of spans: over HTTP unless OpenTelemetry's own variables say otherwise."""
    from semel.telemetry.tracing import Collector

    if endpoint is None:
        return None
    protocol = os.environ.get(TRACES_PROTOCOL) or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    return Collector.of(endpoint, protocol)


def kubernetes_api() -> KubernetesApi:
    """Find the API server of the cluster that this pod is in."""
    from semel.fleet.kubernetes_api import KubernetesApi

    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigError(
            "--worker-endpoint-slices needs a pod of Kubernetes: KUBERNETES_SERVICE_HOST is not set; name workers by "
            "--worker, --worker-file or --worker-dns elsewhere"
        )
    url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return KubernetesApi(url, _SERVICE_ACCOUNT / "token", _SERVICE_ACCOUNT / "ca.crt")


def shut_door() -> None:
    """Keep vLLM in this process, and in those below it, from loading semel's plug-in: `SEMEL` is for plain vLLM."""
    os.environ["SEMEL"] = "0"


@contextmanager
def default_variable(name: str, value: str) -> Iterator[None]:
    """Let a variable of the environment have a value for a while, unless it has one; children inherit it."""
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
    """Let a variable of the environment name a folder for a while, unless it has a value; children inherit it."""
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
