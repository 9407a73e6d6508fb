"""Envoy's configuration for cells, as JSON.

Two steps in one Envoy. The first has one endpoint for each cell and hashes the tenant to choose one. The second is a
listener for each cell, on a socket that has no file, which gives a request to the least busy of the cell's frontends.
So a tenant is in a cell, and not at one of its frontends, and a cell is down only if none of its frontends is up.

What could not be sent is sent to the next cell, and nothing else: the second step says so in a header (`UNSENT`).
Nothing here logs a request, so no API key gets into a log.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

from semel.cells.file import API_KEY_HEADERS, CellsFile, LargeTenant, Listening, split_address
from semel.cells.placement import Cell, home_cells

__all__ = ["UNSENT", "envoy_config"]

UNSENT: Final = "x-semel-unsent"
"""The header of an answer that no frontend gave: nothing of the request has reached one."""

_Json = dict[str, Any]

_PROBE: Final = "/semel-cell"
_EXTENSIONS: Final = "type.googleapis.com/envoy.extensions"
_RING_POINTS: Final = 65_536
_MAX_BUFFERED_BYTES: Final = 16 << 20
"""Of a request's body: what Envoy keeps to send it to another cell."""

_HOST_ATTEMPTS: Final = 100
"""Steps along the ring to a cell that was not tried yet; neighbours may be the same one."""

_MIN_UP_PERCENT: Final = 1
"""Of a cell's frontends; Envoy counts in whole percents, and 0 would always be met."""

_BEARER: Final = "(?i)^bearer +"
_MANY: Final = 65_536


def envoy_config(file: CellsFile) -> str:
    """Return the configuration, for `envoy --config-path FILE.json`."""
    listeners = [_entry(file), *(_cell_listener(file.listening, cell) for cell in file.cells)]
    clusters = [
        _choice("cells", file, file.cells),
        *(_large_choice(file, tenant) for tenant in file.tenants),
        *map(_cell_cluster, file.cells),
    ]
    return json.dumps({"static_resources": {"listeners": listeners, "clusters": clusters}}, indent=2) + "\n"


def _entry(file: CellsFile) -> _Json:
    """Return where clients connect."""
    large = [
        _route(_by_tenant(file, one), f"tenant-{one.name}", [_header(file.session_header)]) for one in file.tenants
    ]
    routes = [
        {"match": {"path": "/metrics"}, "direct_response": {"status": 404}},
        *large,
        _route({"prefix": "/"}, "cells", _tenant_policies(file)),
    ]
    manager = _manager("semel", routes, [_router()]) | {
        "use_remote_address": True,
        "request_headers_timeout": "30s",
        "common_http_protocol_options": {
            "idle_timeout": "300s",
            "headers_with_underscores_action": "REJECT_REQUEST",
        },
    }
    chain: _Json = {"filters": [_filter(manager)]}
    if file.listening.certificate:
        chain["transport_socket"] = _tls(file.listening)
    address = {"address": file.listening.host, "port_value": file.listening.port}
    return {"name": "entry", "address": {"socket_address": address}, "filter_chains": [chain]}


def _route(match: _Json, cluster: str, policies: Sequence[_Json]) -> _Json:
    retries = {
        "retry_on": "connect-failure,retriable-headers",
        "retriable_headers": [{"name": UNSENT, "present_match": True}],
        "num_retries": 3,
        "retry_host_predicate": [_previous_hosts()],
        "host_selection_retry_max_attempts": _HOST_ATTEMPTS,
    }
    route = {"cluster": cluster, "timeout": "0s", "hash_policy": list(policies), "retry_policy": retries}
    return {"match": match, "route": route, "response_headers_to_remove": [UNSENT]}


def _tenant_policies(file: CellsFile) -> list[_Json]:
    """Return what is hashed: the tenant's name if a gateway tells it, else its API key, else the client's address."""
    if file.tenant_header:
        found = [_header(file.tenant_header)]
    else:
        authorization, key = API_KEY_HEADERS
        rewrite = {"pattern": {"regex": _BEARER}, "substitution": ""}
        found = [_header(authorization, regex_rewrite=rewrite), _header(key)]
    return [*found, {"connection_properties": {"source_ip": True}}]


def _header(name: str, **more: _Json) -> _Json:
    return {"header": {"header_name": name, **more}, "terminal": True}


def _by_tenant(file: CellsFile, tenant: LargeTenant) -> _Json:
    return {"prefix": "/", "headers": [{"name": file.tenant_header, "string_match": {"exact": tenant.name}}]}


def _cell_listener(listening: Listening, cell: Cell) -> _Json:
    """Return the second step: the cell's frontends, and whether one of them is up."""
    routes = [{"match": {"prefix": "/"}, "route": _cell_route(cell)}]
    probe = {
        "name": "envoy.filters.http.health_check",
        "typed_config": {
            "@type": f"{_EXTENSIONS}.filters.http.health_check.v3.HealthCheck",
            "pass_through_mode": False,
            "headers": [{"name": ":path", "string_match": {"exact": _PROBE}}],
            "cluster_min_healthy_percentages": {_cluster_name(cell): {"value": _MIN_UP_PERCENT}},
        },
    }
    unsent = {
        "filter": {"response_flag_filter": {"flags": ["UF", "UH"]}},  # no connection was made, or none was tried
        "headers_to_add": [{"header": {"key": UNSENT, "value": "1"}}],
    }
    manager = _manager(f"cell_{cell.name}", routes, [probe, _router()]) | {
        "skip_xff_append": True,
        "local_reply_config": {"mappers": [unsent]},
    }
    return {
        "name": f"cell-{cell.name}",
        "address": _socket(listening, cell),
        "filter_chains": [{"filters": [_filter(manager)]}],
    }


def _cell_route(cell: Cell) -> _Json:
    retries = {
        "retry_on": "connect-failure",  # nothing of the request has been sent then
        "num_retries": 2,
        "retry_host_predicate": [_previous_hosts()],
        "host_selection_retry_max_attempts": 5,
    }
    return {"cluster": _cluster_name(cell), "timeout": "0s", "retry_policy": retries}


def _manager(stat_prefix: str, routes: Sequence[_Json], filters: Sequence[_Json]) -> _Json:
    """Return a connection manager without limits of time for answers: semel has its own."""
    host = {
        "name": "all",
        "domains": ["*"],
        "routes": list(routes),
        "request_body_buffer_limit": _MAX_BUFFERED_BYTES,
    }
    return {
        "@type": f"{_EXTENSIONS}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": stat_prefix,
        "stream_idle_timeout": "0s",
        "route_config": {"virtual_hosts": [host]},
        "http_filters": list(filters),
    }


def _choice(name: str, file: CellsFile, cells: Iterable[Cell], others: Iterable[Cell] = ()) -> _Json:
    """Return the first step: a cell by hash; `others` if none of these is up."""
    hashing: _Json = {"hash_balance_factor": file.balance_factor} if file.balance_factor else {}
    endpoints = [
        {
            "locality": {"zone": cell.zone or "none", "sub_zone": cell.name},
            "lb_endpoints": [
                {
                    "endpoint": {"address": _socket(file.listening, cell)},
                    "load_balancing_weight": cell.weight,
                    "metadata": {"filter_metadata": {"envoy.lb": {"hash_key": cell.name}}},
                }
            ],
            "priority": priority,
        }
        for priority, group in enumerate((cells, others))
        for cell in group
    ]
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "2s",
        "lb_policy": "RING_HASH",
        "ring_hash_lb_config": {"minimum_ring_size": _RING_POINTS, "maximum_ring_size": 8 * _RING_POINTS},
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}, "consistent_hashing_lb_config": hashing},
        "circuit_breakers": _no_breakers(),
        "health_checks": [_health_check(_PROBE, interval="0.25s", unhealthy_threshold=1)],
        "load_assignment": {"cluster_name": name, "endpoints": endpoints},
    }


def _large_choice(file: CellsFile, tenant: LargeTenant) -> _Json:
    home = home_cells(tenant.name, file.cells, tenant.cells)
    return _choice(f"tenant-{tenant.name}", file, home, [cell for cell in file.cells if cell not in home])


def _cell_cluster(cell: Cell) -> _Json:
    name, idle = _cluster_name(cell), {"idle_timeout": "60s"}  # a frontend closes idle connections after 75 s
    options = {
        "@type": f"{_EXTENSIONS}.upstreams.http.v3.HttpProtocolOptions",
        "common_http_protocol_options": idle,
        "explicit_http_config": {"http_protocol_options": {}},
    }
    return {
        "name": name,
        "type": "STRICT_DNS",
        "connect_timeout": "2s",
        "lb_policy": "LEAST_REQUEST",
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options},
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "circuit_breakers": _no_breakers(),
        "health_checks": [_health_check("/ready", interval="1s", unhealthy_threshold=2)],
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [_endpoint(address) for address in cell.addresses]}],
        },
    }


def _endpoint(address: str) -> _Json:
    host, port = split_address(address)
    return {"endpoint": {"address": {"socket_address": {"address": host, "port_value": port}}}}


def _health_check(path: str, *, interval: str, unhealthy_threshold: int) -> _Json:
    """Also before the first request: without `no_traffic_interval` a cell is asked once a minute until then."""
    return {
        "http_health_check": {"path": path},
        "timeout": "1s",
        "interval": interval,
        "no_traffic_interval": interval,
        "unhealthy_threshold": unhealthy_threshold,
        "healthy_threshold": 1,
    }


def _no_breakers() -> _Json:
    """Lift Envoy's own bounds, which are low: three retries at a time, when a whole cell has to be taken over."""
    bounds = ("max_connections", "max_pending_requests", "max_requests", "max_retries")
    return {"thresholds": [dict.fromkeys(bounds, _MANY)]}


def _cluster_name(cell: Cell) -> str:
    return f"cell-{cell.name}"


def _socket(listening: Listening, cell: Cell) -> _Json:
    return {"pipe": {"path": f"@semel-cells-{listening.port}-{cell.name}"}}


def _previous_hosts() -> _Json:
    name = "envoy.retry_host_predicates.previous_hosts"
    kind = f"{_EXTENSIONS}.retry.host.previous_hosts.v3.PreviousHostsPredicate"
    return {"name": name, "typed_config": {"@type": kind}}


def _router() -> _Json:
    kind = f"{_EXTENSIONS}.filters.http.router.v3.Router"
    return {"name": "envoy.filters.http.router", "typed_config": {"@type": kind}}


def _filter(manager: _Json) -> _Json:
    return {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}


def _tls(listening: Listening) -> _Json:
    certificate = {
        "certificate_chain": {"filename": listening.certificate},
        "private_key": {"filename": listening.private_key},
    }
    context = {
        "alpn_protocols": ["h2", "http/1.1"],
        "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
        "tls_certificates": [certificate],
    }
    kind = f"{_EXTENSIONS}.transport_sockets.tls.v3.DownstreamTlsContext"
    return {
        "name": "envoy.transport_sockets.tls",
        "typed_config": {"@type": kind, "common_tls_context": context},
    }
