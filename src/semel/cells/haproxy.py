"""HAProxy's configuration for cells, for 2.6 and newer.

The same two steps as with Envoy: a backend with one server for each cell, which hashes the tenant, and a proxy for each
cell on a socket that has no file. A cell whose frontends take no connection closes without an answer, and only that is
sent to another cell again.

Nothing here logs a request, so no API key gets into a log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from ipaddress import ip_address
from typing import Final

from semel.cells.file import API_KEY_HEADERS, CellsFile, LargeTenant, Listening, split_address
from semel.cells.placement import Cell, home_cells
from semel.errors import ConfigError

__all__ = ["haproxy_config", "server_numbers"]

_PROBE: Final = "/semel-cell"
_MAX_WEIGHT: Final = 256
"""HAProxy's own. A server has 16 points on the ring for each unit: the more, the evener are the shares."""

_NUMBERS: Final = 1 << 20
"""HAProxy multiplies a server's number by 4,096 in 32 bits to place it on the ring."""


def haproxy_config(file: CellsFile) -> str:
    """Return the configuration, for `haproxy -f FILE`."""
    sections = [
        _resolvers(),
        _defaults(),
        _frontend(file),
        _choice("cells", file, "var(txn.tenant)", file.cells),
        *(_large_choice(file, tenant) for tenant in file.tenants),
        *(_cell(file.listening, cell) for cell in file.cells),
    ]
    return "\n".join("\n    ".join(lines) + "\n" for lines in sections)


def server_numbers(names: Iterable[str]) -> dict[str, int]:
    """Return a number for each cell, of its name alone: HAProxy hashes it, and the order of a file may change."""
    by_number: dict[int, str] = {}
    for name in sorted(names):
        number = int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "big") % _NUMBERS
        while not number or number in by_number:
            number = (number + 1) % _NUMBERS
        by_number[number] = name
    return {name: number for number, name in by_number.items()}


def _resolvers() -> list[str]:
    """Look names of frontends up again, as the machine does it: addresses change."""
    return ["resolvers dns", "parse-resolv-conf", "hold valid 10s"]


def _defaults() -> list[str]:
    """Without limits of time for answers: semel has its own. HAProxy wants a number."""
    return [
        "defaults",
        "mode http",
        "timeout connect 2s",
        "timeout client 1h",
        "timeout server 1h",
        "timeout http-request 30s",
        "timeout http-keep-alive 60s",
        "timeout check 1s",
        "option http-keep-alive",
        "option redispatch 1",
        "retries 3",
    ]


def _frontend(file: CellsFile) -> list[str]:
    """Return where clients connect."""
    return [
        "frontend entry",
        f"bind {_bound(file.listening)}",
        "option forwardfor",
        "http-request return status 404 if { path /metrics }",
        *_tenant_lines(file),
        f"http-request set-var(txn.session) req.hdr({file.session_header})",
        *(
            f"use_backend tenant-{tenant.name} if {{ req.hdr({file.tenant_header}) -m str {tenant.name} }}"
            for tenant in file.tenants
        ),
        "default_backend cells",
    ]


def _tenant_lines(file: CellsFile) -> Iterator[str]:
    """Return what is hashed: the tenant's name if a gateway tells it, else its API key, else the client's address."""
    unless = "unless { var(txn.tenant) -m found }"
    if file.tenant_header:
        yield f"http-request set-var(txn.tenant) req.fhdr({file.tenant_header})"
    else:
        authorization, key = API_KEY_HEADERS
        yield f"http-request set-var(txn.tenant) req.fhdr({authorization}),regsub('^bearer +','',i)"
        yield f"http-request set-var(txn.tenant) req.fhdr({key}) {unless}"
    yield f"http-request set-var(txn.tenant) src {unless}"


def _choice(
    name: str, file: CellsFile, hashed: str, cells: tuple[Cell, ...], others: tuple[Cell, ...] = ()
) -> list[str]:
    """Return the first step: a cell by hash; `others` if none of these is up."""
    scale = _MAX_WEIGHT // max(cell.weight for cell in file.cells)
    factor = [f"hash-balance-factor {max(file.balance_factor, 101)}"] if file.balance_factor else []
    numbers = server_numbers(cell.name for cell in file.cells)
    return [
        f"backend {name}",
        f"balance hash {hashed}",
        "hash-type consistent sdbm avalanche",
        *factor,
        "option allbackups",
        f"option httpchk GET {_PROBE}",
        "retry-on conn-failure empty-response",  # an empty one: nothing of the request has reached a frontend
        "default-server inter 250ms fall 1 rise 1",
        *(
            f"server {cell.name} {_socket(file.listening, cell)} id {numbers[cell.name]} "
            f"weight {cell.weight * scale} check{backup}"
            for group, backup in ((cells, ""), (others, " backup"))
            for cell in group
        ),
    ]


def _large_choice(file: CellsFile, tenant: LargeTenant) -> list[str]:
    home = home_cells(tenant.name, file.cells, tenant.cells)
    others = tuple(cell for cell in file.cells if cell not in home)
    return _choice(f"tenant-{tenant.name}", file, "var(txn.session)", home, others)


def _cell(listening: Listening, cell: Cell) -> list[str]:
    """Return the second step: the cell's frontends, and whether one of them is up."""
    return [
        f"listen cell-{cell.name}",
        f"bind {_socket(listening, cell)}",
        f"monitor-uri {_PROBE}",
        f"monitor fail if {{ nbsrv(cell-{cell.name}) lt 1 }}",
        "balance leastconn",
        "option httpchk GET /ready",
        "http-check expect status 200",
        "errorfile 503 /dev/null",  # nobody took the connection: close, and the first step asks another cell
        "default-server inter 1s fastinter 250ms fall 2 rise 1 observe layer4 error-limit 1 on-error mark-down",
        *(
            f"server frontend-{number} {address} check{_by_name(address)}"
            for number, address in enumerate(cell.addresses, 1)
        ),
    ]


def _by_name(address: str) -> str:
    """Return what a server needs whose host is a name; one that is not known yet is no reason not to start."""
    try:
        ip_address(split_address(address)[0])
    except ValueError:
        return " resolvers dns init-addr last,libc,none"
    return ""


def _bound(listening: Listening) -> str:
    host = f"[{listening.host}]" if ":" in listening.host else listening.host
    address = f"{host}:{listening.port}"
    if not listening.certificate:
        return address
    if listening.private_key not in (listening.certificate, f"{listening.certificate}.key"):
        name = f"{listening.certificate}.key"
        raise ConfigError(f"HAProxy finds a private key only in the certificate's file or beside it; name it {name}")
    return f"{address} ssl crt {listening.certificate} alpn h2,http/1.1 ssl-min-ver TLSv1.2"


def _socket(listening: Listening, cell: Cell) -> str:
    return f"abns@semel-cells-{listening.port}-{cell.name}"
