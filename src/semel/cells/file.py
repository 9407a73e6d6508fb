"""The cells file: which cells there are and where, in TOML. What it has wrong is named with its place."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from semel.cells.placement import Cell
from semel.errors import ConfigError

__all__ = ["API_KEY_HEADERS", "CellsFile", "LargeTenant", "Listening", "read_cells", "split_address"]

API_KEY_HEADERS: Final = ("authorization", "x-api-key")
"""The headers with an API key; the first counts if both are there."""

_ADDRESS: Final = re.compile(r"(?:\[([0-9a-fA-F:]+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})")
_MAX_PORT: Final = 65_535
_MAX_CELLS: Final = 256

Header = Annotated[str, Meta(pattern="^[a-z0-9-]{1,64}$")]
FilePath = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._/+@-]+$")]
"""It is written into configurations: no blanks, no quotes."""


class LargeTenant(Struct, frozen=True, forbid_unknown_fields=True):
    """A tenant that lives in more than one cell."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    cells: Annotated[int, Meta(ge=2, le=_MAX_CELLS)]


class Listening(Struct, frozen=True):
    """The address and the certificate of a balancer."""

    host: str
    port: int
    certificate: str = ""
    private_key: str = ""


class CellsFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of a cells file."""

    cells: Annotated[tuple[Cell, ...], Meta(min_length=1, max_length=_MAX_CELLS)]
    listen: str = "127.0.0.1:8080"
    tenant_header: Header = ""
    """The header with a tenant's name, which a gateway before the balancer sets; empty if there is none, and the API
    key stands for its tenant."""

    session_header: Header = "x-session-id"
    balance_factor: Annotated[int, Meta(ge=0, le=10_000)] = 200
    """The most requests in flight in one cell, in percent of its share of all; 0 for no bound."""

    tenants: tuple[LargeTenant, ...] = ()
    certificate: FilePath = ""
    private_key: FilePath = ""

    @property
    def listening(self) -> Listening:
        """The address and the certificate of the balancer."""
        return Listening(*split_address(self.listen), self.certificate, self.private_key)


def read_cells(path: Path) -> CellsFile:
    """Read a cells file, or refuse it: the first thing that is wrong, and where."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"cannot read the cells file {path}: {reason}") from None
    try:
        found = msgspec.convert(tomllib.loads(text), CellsFile)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from None
    if (wrong := next(_faults(found), None)) is not None:
        raise ConfigError(f"{path}: {wrong}")
    return found


def split_address(address: str) -> tuple[str, int]:
    """Return the host and the port of HOST:PORT; a host with colons stands in brackets."""
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found[3]) <= _MAX_PORT:
        raise ConfigError(f"{address!r} is no address; write HOST:PORT")
    return found[1] or found[2], int(found[3])


def _faults(found: CellsFile) -> Iterator[str]:
    """Return what no type can say."""
    yield from _repeated("cell", [cell.name for cell in found.cells])
    yield from _repeated("tenant", [tenant.name for tenant in found.tenants])
    addresses = [address for cell in found.cells for address in cell.addresses]
    for address in (found.listen, *addresses):
        try:
            split_address(address)
        except ConfigError as error:
            yield str(error)
    for address in (address for address, count in Counter(addresses).items() if count > 1):
        owners = " and ".join(cell.name for cell in found.cells if address in cell.addresses)
        yield f"{address} stands there twice, in {owners}; a frontend is in one cell"
    if found.tenants and found.tenant_header in ("", *API_KEY_HEADERS):
        yield (
            f"tenant {found.tenants[0].name!r} is to live in {found.tenants[0].cells} cells, but a balancer sees only "
            "API keys; set tenant_header to a header in which a gateway before it names the tenant"
        )
    for tenant in found.tenants:
        if tenant.cells > len(found.cells):
            yield f"tenant {tenant.name!r} cannot live in {tenant.cells} cells; there are {len(found.cells)}"
    if bool(found.certificate) != bool(found.private_key):
        yield "certificate and private_key go together; name both, or none for plain HTTP"


def _repeated(what: str, names: list[str]) -> Iterator[str]:
    for name, count in Counter(names).items():
        if count > 1:
            yield f"there are {count} {what}s named {name!r}; give each a name of its own"
