"""The name of a process's cell."""

from __future__ import annotations

import re
from dataclasses import dataclass

from semel.cells.placement import CELL_NAME
from semel.core.flag import flag
from semel.errors import ConfigError

__all__ = ["CellSettings"]


@dataclass(frozen=True, slots=True)
class CellSettings:
    """The cell that a process belongs to."""

    cell: str | None = flag(
        None,
        help="Name of the cell that this process belongs to, the same for its frontends and workers: others are not "
        "used. It is shown in metrics, spans, JSON logs and /ready.",
        group="Fleet",
    )

    @property
    def name(self) -> str | None:
        """It, or a refusal: it has to fit into names of hosts, metrics and sockets."""
        if self.cell is not None and not re.fullmatch(CELL_NAME, self.cell):
            raise ConfigError(
                f"--cell {self.cell!r} is no name of a cell; use at most 32 lower-case letters, digits and dashes"
            )
        return self.cell
