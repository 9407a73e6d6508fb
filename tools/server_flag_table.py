"""The table of vLLM's server flags on the page for people who come from vLLM: `python -m tools.server_flag_table`.

python -m tools.server_flag_table              # write the table into the page
python -m tools.server_flag_table WHEEL        # print the flags of another vLLM, for server_flags.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from semel.engine.vllm.compat.flags import server_flags
from semel.engine.vllm.compat.server_flags import ENGINE_FLAGS, FORMER_FLAGS, SERVER_FLAGS, ServerFlag
from tools.engine.versions import read_wheel

PAGE: Final = Path(__file__).parents[1] / "docs" / "get-started" / "coming-from-vllm.md"
BEGIN: Final = "<!-- begin server flags -->\n"
END: Final = "<!-- end server flags -->\n"


def table() -> str:
    """The table as Markdown."""
    rows = [*SERVER_FLAGS, *ENGINE_FLAGS, *FORMER_FLAGS]
    return "".join(f"{line}\n" for line in ("| flag of vLLM | semel | |", "|---|---|---|", *map(_row, rows)))


def _row(row: ServerFlag) -> str:
    note = row.note + (
        f" (vLLM's default is taken: {', '.join(f'`{one}`' for one in row.default)})" * bool(row.default)
    )
    return f"| {', '.join(f'`{one}`' for one in row.spellings)} | {_handling(row)} | {note} |"


def _handling(row: ServerFlag) -> str:
    return f"**{row.handling}**" if row.handling == "refused" else row.handling


def page_with(text: str, page: str) -> str:
    """A page whose table is replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{text}{END}{after}"


def main(arguments: list[str]) -> Iterator[str]:
    """Write the table, or the flags of a wheel."""
    for wheel in arguments:
        yield json.dumps(sorted(server_flags(read_wheel("vllm", Path(wheel)))), indent=2)
    if not arguments:
        PAGE.write_text(page_with(table(), PAGE.read_text()))
        yield str(PAGE)


if __name__ == "__main__":
    for line in main(sys.argv[1:]):
        print(line)
