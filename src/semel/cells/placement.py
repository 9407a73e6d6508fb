"""Placement of tenants in cells: rendezvous hashing with weights, and shuffle sharding. Pure.

A cell is a fleet of its own: frontends and workers that know nothing of other cells. A cell of weight 3 draws three
tickets for each key, and the best of all tickets wins: so it wins three times as often, and a cell that comes, goes or
gets another weight moves only the keys that it wins or had.

A tenant lives in one cell, or in as many as its weight says. Two large tenants rarely have all their cells in common,
so one of them can take down the other only in part. A session of such a tenant stays in one of its cells.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from heapq import nlargest
from typing import Final

from semel.core.rendezvous import scores

__all__ = ["MAX_WEIGHT", "Cell", "home_cells", "session_cell"]

MAX_WEIGHT: Final = 100
"""Of a cell: as many hashes are made for it."""

_KEY_BYTES: Final = 32
_TENANT: Final = b"semel tenant"
_SESSION: Final = b"semel session"


@dataclass(frozen=True, slots=True)
class Cell:
    """A fleet of its own."""

    name: str
    addresses: tuple[str, ...] = ()
    """HOST:PORT of its frontends."""

    zone: str = ""
    weight: int = 1
    """Its share of the tenants, compared with other cells."""


def home_cells(tenant: str, cells: Collection[Cell], weight: int = 1) -> tuple[Cell, ...]:
    """Return the cells that a tenant of this weight lives in, the best first."""
    return tuple(nlargest(weight, cells, key=partial(_score, _key(_TENANT, tenant))))


def session_cell(
    tenant: str, session: str, cells: Sequence[Cell], *, weight: int = 1, down: Collection[str] = ()
) -> Cell | None:
    """Return the cell of a tenant's session, none of those whose names are `down`; None if all are.

    If the session's own cell is down, the tenant's other cells are next, and then the rest.
    """
    home = home_cells(tenant, cells, weight)
    rest = home_cells(tenant, cells, len(cells))[weight:]
    by_session = sorted(home, key=partial(_score, _key(_SESSION, tenant, session)), reverse=True)
    return next((cell for cell in (*by_session, *rest) if cell.name not in down), None)


def _score(key: bytes, cell: Cell) -> tuple[bytes, str]:
    """Return the best of a cell's tickets; the name decides between equal ones."""
    tickets = (f"{cell.name}/{number}".encode() for number in range(cell.weight))
    return max(scores(tickets, key)), cell.name


def _key(*parts: bytes | str) -> bytes:
    """Make one key of several texts: each has its length before it, so that no two lists of texts are alike."""
    hasher = blake2b(digest_size=_KEY_BYTES)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.digest()
