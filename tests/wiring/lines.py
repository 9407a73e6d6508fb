"""The command lines: every flag of `semel frontend` and `semel worker` off its default, in one process at least."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from semel.sizing import usable_cores
from tests.wiring.processes import Flags, Places

__all__ = [
    "ACME",
    "BETA",
    "CONFIG",
    "KEY",
    "LINES",
    "edge_frontend",
    "edge_worker",
    "sandboxed_frontend",
    "served_frontend",
    "served_worker",
]

ACME, BETA, KEY = (f"sk-{name}-0123456789abcdef" for name in ("acme", "beta", "edge"))
CONFIG: Final[Mapping[str, str]] = {"served frontend": "root-path: deep\n", "served worker": "max-num-seqs: 7\n"}
"""Files of `--config`."""


def served_worker(at: Places) -> Flags:
    return {
        "listen": at.worker,
        "fleet-key-file": at.home / "key",
        "config": at.home / "worker.yaml",
        "skip-checks": True,
        "drain-delay-s": 0.5,
        "drain-s": 3.5,
        "processor": "hf",
        "trust-remote-code": True,
        "admin-port": at.admin_port,
        "admin-key-file": at.home / "admin-key",
        "metrics-host": "127.0.0.3",
        "encoder-planning": True,
        "disable-lazy-mm-transfer": True,
        "encoder-cache-embeddings": 5_000,
        "embedding-tier-gb": 0.5,
        "embedding-store": f"valkeys://localhost:{at.store_port},valkey://store.invalid:6379",
        "embedding-store-password-file": at.home / "password",
        "embedding-store-ca": at.home / "tls" / "root.pem",
        "embedding-store-plain": True,
        "embedding-store-ttl-s": 1_234,
        "embedding-publish-min-requests": 7,
        "embedding-fetch-ms": 77,
        "embedding-staging-mb": 64,
        "disable-tenant-turns": True,
        "max-schema-bytes": 111,
        "max-request-schema-bytes": 222,
        "max-schema-compile-s": 1.5,
        "structured-outputs-kinds": "schemas",
        "engine-progress-s": 10,
        "cell": "c1",
        "announce-interval-s": 600,
        "max-frontends": 6,
        "log-format": "json",
        "otlp-traces-endpoint": f"http://127.0.0.1:{at.origin_port}/v1/traces",
    }


def served_frontend(at: Places) -> Flags:
    return {
        "fleet-key-file": at.home / "key",
        "config": at.home / "frontend.yaml",
        "worker-file": at.home / "workers",
        "eject-after-failures": 1,
        "drain-delay-s": 0.5,
        "drain-s": 3.5,
        "host": "127.0.0.2",
        "port": at.port,
        "chat-template": at.home / "chat.jinja",
        "chat-template-content-format": "string",
        "api-keys-file": at.home / "keys",
        "priority-tenant": "acme",
        "adapter-tenants": "law=acme",
        "allowed-media-domains": f"localhost:{at.origin_port}",
        "allow-media-http": True,
        "allowed-media-networks": "127.0.0.0/8",
        "allowed-local-media-path": at.home / "media",
        "max-media-bytes": 400_000,
        "media-timeout-s": 4.5,
        "media-cache-gb": 0,
        "media-store": at.home / "store",
        "media-store-gb": 0.05,
        "media-store-ttl-s": 1_000,
        "store-responses": True,
        "max-image-pixels": 460_000,
        "min-image-side": 20,
        "max-document-pages": 3,
        "max-document-bytes": 9_000,
        "max-document-dpi": 100,
        "max-video-s": 20,
        "max-video-frames": 50,
        "max-video-pixels": 300_000,
        "preprocessing-processes": usable_cores() + 1,
        "processor": "hf",
        "trust-remote-code": True,
        "max-processing-s": 6,
        "max-processing-memory-gb": 3,
        "max-body-bytes": 1_800_000,
        "max-body-values": 2_000,
        "max-body-text-bytes": "300KiB",
        "max-request-media-bytes": "2MiB",
        "max-media-bytes-in-flight": "24MiB",
        "max-waiting-requests": 2,
        "max-requests": 5,
        "max-tenant-requests": 3,
        "request-timeout-s": 20,
        "unknown-fields": "refuse",
        "max-address-connections": 30,
        "first-request-s": 2,
        "keep-alive-s": 3,
        "feature-cache": "lru",
        "feature-cache-gb": 0.5,
        "cell": "c1",
        "log-format": "json",
        "otlp-traces-endpoint": f"http://127.0.0.1:{at.origin_port}/v1/traces",
        "disable-uvicorn-access-log": True,
        "metrics-port": at.metrics_port,
        "metrics-host": "127.0.0.3",
        "disable-metrics-per-worker": True,
        "metrics-per-tenant": True,
    }


def edge_worker(at: Places) -> Flags:
    return {
        "listen": f"tcp://127.0.0.1:{at.worker_port}",
        "key-dir": at.home / "keys" / "worker",
        "drain-delay-s": 0.5,
        "drain-s": 3.5,
        "rate": 500,
    }


def edge_frontend(at: Places) -> Flags:
    return {
        "key-dir": at.home / "keys" / "frontend",
        "worker": f"ipc://{at.home}/nobody.sock",
        "worker-dns": f"localhost:{at.worker_port}",
        "worker-dns-interval-s": 3_600,
        "worker-endpoint-slices": "spaces/workers:7000",
        "port": at.port,
        "ssl-certfile": at.home / "tls" / "server.pem",
        "ssl-keyfile": at.home / "tls" / "server.key",
        "ssl-ca-certs": at.home / "tls" / "root.pem",
        "ssl-cert-reqs": 2,
        "ssl-ciphers": "AES256",
        "enable-ssl-refresh": True,
        "allowed-hosts": "chat.example.com",
        "forwarded-allow-ips": "127.0.0.1",
        "api-key": KEY,
        "media-store": "s3://semel-wiring",
        "media-store-timeout-s": 0.5,
        "max-audio-s": 2,
        "max-audio-channels": 1,
        "preprocessing-processes": 1,
        "max-body-s": 3,
        "max-refusals-per-s": 0.1,
        "allowed-origins": "https://page.example",
        "allowed-methods": "GET",
        "allowed-headers": "x-mine",
        "allow-credentials": True,
        "max-connections": 40,
        "max-head-bytes": 4_096,
        "max-head-fields": 20,
        "metrics-port": at.metrics_port,
        "drain-delay-s": 0,
    }


def sandboxed_frontend(at: Places) -> Flags:
    """At the worker of `edge`."""
    return {
        "key-dir": at.home / "keys" / "frontend",
        "worker": f"tcp://127.0.0.1:{at.worker_port}",
        "port": at.port,
        "metrics-port": at.metrics_port,
        "preprocessing-processes": 1,
        "require-sandbox": True,
        "skip-checks": True,
    }


LINES: Final[Mapping[str, Callable[[Places], Flags]]] = {
    "served worker": served_worker,
    "served frontend": served_frontend,
    "edge worker": edge_worker,
    "edge frontend": edge_frontend,
    "sandboxed frontend": sandboxed_frontend,
}
