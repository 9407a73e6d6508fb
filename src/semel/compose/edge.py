"""What of a frontend faces its clients and its operator, besides the API itself."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from semel.compose.reloading import ReloadedFiles
from semel.core import Keyring
from semel.settings.frontend import ServingSettings
from semel.settings.secrets import read_api_keys
from semel.telemetry import Meter
from semel.web.limits import ConnectionLimits

if TYPE_CHECKING:
    from semel.web.server import HttpServer

__all__ = ["metrics_server", "reloaded_files", "say_where_metrics_are"]

_MAX_OPERATORS: Final = 64

logger = logging.getLogger(__name__)


def metrics_server(serving: ServingSettings, meter: Meter, reason: Callable[[], str]) -> HttpServer:
    """The server of the metrics port."""
    from starlette.applications import Starlette

    from semel.web.host_check import HostCheck, allowed_hosts_at
    from semel.web.server import HttpServer, operator_routes

    host, port = serving.metrics_host, serving.metrics_port
    assert port is not None
    app: Any = Starlette(routes=operator_routes(meter, reason))
    if hosts := allowed_hosts_at(host, serving.peers.allowed_hosts, has_keys=False):
        app = HostCheck(app, hosts)
    limits = ConnectionLimits(max_connections=_MAX_OPERATORS)
    return HttpServer(app, host, port, limits, port_flag="--metrics-port", host_flag="--metrics-host")


def say_where_metrics_are(serving: ServingSettings, keys: Keyring) -> None:
    """Log at the start that nobody can read the metrics, if API keys close the main port and there is no other."""
    if keys and serving.metrics_port is None:
        logger.info("with API keys, /metrics is served at --metrics-port only, and none is set")


def reloaded_files(
    serving: ServingSettings, keys: Keyring, server: HttpServer, meter: Meter
) -> Iterator[ReloadedFiles[Any]]:
    """The files that are read again when they change: API keys, and certificates."""
    if (path := serving.keys.api_keys_file) is not None:
        yield ReloadedFiles("api_keys", [path], lambda: read_api_keys(serving.keys), keys.replace, meter)
    if serving.tls.is_on:

        def use(context: ssl.SSLContext | None) -> None:
            assert context is not None
            server.use_tls(context)

        yield ReloadedFiles("certificate", serving.tls.files, serving.tls.context, use, meter)
