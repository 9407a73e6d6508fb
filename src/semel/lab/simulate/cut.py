"""A fleet that is cut into cells: each has its own frontends and workers, and its own tenants or conversations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from semel.core.rendezvous import rank
from semel.lab.simulate.members import Sizes
from semel.lab.simulate.workload import Ask, Workload

__all__ = ["CellBy", "CellWorkload", "sizes_of_cells"]

CellBy = Literal["tenant", "conversation"]


@dataclass(frozen=True)
class CellWorkload:
    """What one cell gets of a workload."""

    workload: Workload
    cell: int
    cells: int
    by: CellBy = "tenant"

    def asks(self, rng: Random) -> Iterator[Ask]:
        """Its requests, in order of time."""
        known: dict[str, bool] = {}
        for ask in self.workload.asks(rng):
            key = ask.tenant if self.by == "tenant" else str(ask.conversation)
            if (is_ours := known.get(key)) is None:
                is_ours = known[key] = self._is_ours(key)
            if is_ours:
                yield ask

    def _is_ours(self, key: str) -> bool:
        return max(range(self.cells), key=lambda cell: rank(f"cell-{cell}", key.encode()[:64])) == self.cell


def sizes_of_cells(sizes: Sizes, cells: int) -> list[Sizes]:
    """The fleet in so many parts, as equal as possible."""

    def part(total: int, cell: int) -> int:
        return total // cells + (cell < total % cells)

    return [
        replace(sizes, frontends=part(sizes.frontends, cell), workers=part(sizes.workers, cell))
        for cell in range(cells)
    ]
