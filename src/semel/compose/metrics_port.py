"""The metrics port of a frontend: /metrics, /health and /ready for its operator."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from semel.core import Keyring
from semel.settings.frontend import ServingSettings
from semel.telemetry import Meter
from semel.web.limits import ConnectionLimits

if TYPE_CHECKING:
    from semel.web.server import HttpServer

__all__ = ["log_missing_metrics_port", "metrics_server"]

_MAX_OPERATORS: Final = 64

logger = logging.getLogger(__name__)


def metrics_server(serving: ServingSettings, meter: Meter, reason: Callable[[], str]) -> HttpServer:
    """Make the server of the metrics port."""
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


def log_missing_metrics_port(serving: ServingSettings, keys: Keyring) -> None:
    """Log at the start that nobody can read the metrics, if API keys close the main port and there is no other."""
    if keys and serving.metrics_port is None:
        logger.info("with API keys, /metrics is served at --metrics-port only, and none is set")
