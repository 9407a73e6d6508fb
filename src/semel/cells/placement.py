"""Placement of tenants in cells: rendezvous hashing with weights, and shuffle sharding. Pure.

A cell is a fleet of its own: frontends and workers that know nothing of other cells. A cell of weight 3 draws three
tickets for each key, and the best of all tickets wins: so it wins three times as often, and a cell that comes, goes or
gets another weight moves only the keys that it wins or had.

A tenant lives in one cell, or in as many as its weight says. Two large tenants rarely have all their cells in common,
so one of them can take down the other only in part.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from hashlib import blake2b
from heapq import nlargest
from typing import Annotated, Final

from msgspec import Meta, Struct

from semel.core.rendezvous import scores

__all__ = ["CELL_NAME", "Cell", "home_cells"]

CELL_NAME: Final = r"[a-z0-9][a-z0-9-]{0,31}"
"""Of a cell: it fits into names of hosts, metrics and sockets."""

_KEY_BYTES: Final = 32
_TENANT: Final = b"semel tenant"


class Cell(Struct, frozen=True, forbid_unknown_fields=True):
    """A fleet of its own."""

    name: Annotated[str, Meta(pattern=f"^{CELL_NAME}$")]
    addresses: Annotated[tuple[str, ...], Meta(min_length=1, max_length=1_024)]
    """HOST:PORT of its frontends."""

    zone: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{0,64}$")] = ""
    weight: Annotated[int, Meta(ge=1, le=100)] = 1
    """Its share of the tenants, compared with other cells: as many hashes are made for it."""


def home_cells(tenant: str, cells: Collection[Cell], weight: int = 1) -> tuple[Cell, ...]:
    """Return the cells that a tenant of this weight lives in, the best first."""
    return tuple(nlargest(weight, cells, key=partial(_score, _key(tenant))))


def _score(key: bytes, cell: Cell) -> tuple[bytes, str]:
    """Return the best of a cell's tickets; the name decides between equal ones."""
    tickets = (f"{cell.name}/{number}".encode() for number in range(cell.weight))
    return max(scores(tickets, key)), cell.name


def _key(tenant: str) -> bytes:
    """Return the key of a tenant's hashes."""
    hasher = blake2b(digest_size=_KEY_BYTES)
    for part in (_TENANT, tenant.encode()):
        hasher.update(len(part).to_bytes(8, "little") + part)
    return hasher.digest()
