"""The table of docs/internals/encoder.md that `scripts/matrix --write` writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tools.engine.matrix import MATRIX, Configuration
from tools.engine.matrix_parity import MatrixResult
from tools.engine.models_page import replace_section

__all__ = ["HEAD", "SECTION", "replace_results", "row_of"]

SECTION: Final = "matrix"
HEAD: Final = (
    "| | configuration | probes | random requests (aborted) | evictions | preemptions | lazy | planted faults |",
    "|---|---|---|---|---|---|---|---|",
)
_MB: Final = 1_000_000


def row_of(one: Configuration, result: MatrixResult) -> str:
    """Return the row of a configuration."""
    start = f"| {one.name} | {one.title}"
    if not result.random:
        return f"{start} | {result.faults[0] if result.faults else ''} | | | | | |"
    lazy_transfer = (
        f"{result.left_out_bytes / _MB:.0f} MB left out, {result.late_bytes / _MB:.0f} late" if one.ships else "off"
    )
    found = ", ".join(f"{name} {'found' if is_caught else 'NOT FOUND'}" for name, is_caught in result.caught.items())
    loads = f", {result.loads} loaded" if one.tier_bytes else ""
    cells = (
        f"{result.equal_probes} of {result.probes}" if result.probes else "none",
        f"{result.equal_random} of {result.random} ({result.aborted})",
        f"{result.evictions} of the encoder, {result.item_evictions} items{loads}",
        str(result.preemptions),
        lazy_transfer,
        found or "none",
    )
    return f"{start} | {' | '.join(cells)} |"


def replace_results(page: str, rows: Mapping[str, str]) -> str:
    """Return the page with these rows, by configuration; those of others stay."""
    begin, end = (f"<!-- {mark} {SECTION} -->\n" for mark in ("begin", "end"))
    old = page.partition(begin)[2].partition(end)[0].splitlines()
    table = {line.split("|")[1].strip(): line for line in old if line.startswith("|")}
    table = {**table, **rows}
    return replace_section(page, SECTION, [*HEAD, *(table[name] for name in MATRIX if name in table)])
