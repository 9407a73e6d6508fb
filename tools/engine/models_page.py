"""The tables of docs/get-started/models.md that `scripts/families --write` writes; what `semel doctor` says of them.

`python -m tools.engine.models_page` writes the latter anew from the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import semel
from semel.processing.processor import choose_processor
from tools.engine.family_parity import Parity

__all__ = [
    "DOCTOR",
    "HEAD",
    "PAGE",
    "path_of",
    "replace_column",
    "replace_rows",
    "replace_section",
    "row_of",
    "rows_for_doctor",
    "write_for_doctor",
]

HEAD: Final = (
    (
        "| family | modalities, most in a prompt | processor | answers as bare vLLM's | control | lies | image sizes "
        "| layout from the header |"
    ),
    "|---|---|---|---|---|---|---|---|",
)


PAGE: Final = Path(__file__).parents[2] / "docs" / "get-started" / "models.md"


def row_of(family: str, config: Mapping[str, Any], found: Parity | str, layouts: str) -> str:
    """Return the row of a family; `layouts` says of how many sizes the header told the layout."""
    name, path = f"| {family} (`{config['model_type']}`)", path_of(config)
    if isinstance(found, str):
        return f"{name} | | {path} | {found} | | | | {layouts} |"
    modalities = ", ".join(f"{modality} {limit}" for modality, limit in found.modalities.items())
    equal = f"{found.equal} of {found.questions} with {found.items} items"
    control = "seen" if found.is_control_seen else "NOT SEEN"
    sizes = f"{found.sizes - len(found.refused_sizes)} of {found.sizes}" if found.sizes else ""
    return f"{name} | {modalities} | {path} | {equal} | {control} | {_counted(found.lies)} | {sizes} | {layouts} |"


def path_of(config: Mapping[str, Any]) -> str:
    """Return whose processor makes the features with `--processor auto`."""
    return "fast" if choose_processor("auto", config) == "hf" else "generic"


def _counted(lies: Mapping[str, str]) -> str:
    outcomes = [*lies.values()]
    return ", ".join(f"{outcomes.count(kind)} {kind}" for kind in dict.fromkeys(sorted(outcomes, reverse=True)))


def replace_rows(page: str, rows: Mapping[str, str]) -> str:
    """Return the page with these rows, by family, in its table of families; rows of other families stay."""
    lines, start, end = _table(page)
    table = {**{_family(line): line for line in lines[start:end]}, **rows}
    return "\n".join([*lines[:start], *(table[family] for family in sorted(table)), *lines[end:]]) + "\n"


def replace_column(page: str, cells: Mapping[str, str]) -> str:
    """Return the page with these cells, by family, in the last column of its table of families."""
    lines, start, end = _table(page)
    rows = {
        family: f"{line.rpartition(' | ')[0]} | {cells[family]} |"
        for line in lines[start:end]
        if (family := _family(line)) in cells
    }
    return replace_rows(page, rows)


def _table(page: str) -> tuple[list[str], int, int]:
    """Return the lines of a page, and where its table of families begins and ends."""
    lines = page.splitlines()
    start = lines.index(HEAD[1]) + 1
    end = next(index for index in range(start, len(lines) + 1) if not lines[index : index + 1] or lines[index] == "")
    return lines, start, end


def replace_section(page: str, name: str, lines: Iterable[str]) -> str:
    """Return the page with these lines between the marks of a section."""
    begin, end = (f"<!-- {mark} {name} -->\n" for mark in ("begin", "end"))
    before, _, rest = page.partition(begin)
    _, _, behind = rest.partition(end)
    return before + begin + "\n".join(lines) + "\n" + end + behind


def _family(line: str) -> str:
    return line.removeprefix("| ").partition(" ")[0]


def rows_for_doctor(page: str) -> dict[str, dict[str, str]]:
    """Return what `semel doctor MODEL` says of a model: by its type if it was compared, else by its architecture."""
    compared = dict.fromkeys(_FAST, "compared with bare vLLM's answers in the tests of the project")
    compared |= {match[2]: f"row {match[1]}: {_said(match[3])}" for match in _ROW.finditer(page)}
    treated = {
        architecture: f"{match[1]}: {match[2]}"
        for match in _TREATED.finditer(page)
        for architecture in re.findall(r"`(\w+)`", match[3])
    }
    return {"types": compared, "architectures": treated}


def _said(words: str) -> str:
    return words if words.startswith("not compared") else f"{words}, answered as bare vLLM answers"


_FAST: Final = ("qwen2_vl", "qwen2_5_vl", "gemma3", "idefics3", "llava", "qwen2_audio", "whisper")
_ROW: Final = re.compile(r"^\| ([\w.-]+) \(`(\w+)`\) \|[^|]*\|[^|]*\| ([^|]+?) \|", re.MULTILINE)
_TREATED: Final = re.compile(r"^\| (splice|apply|limited|refused) \(\d+\) \| ([^|]+?) \| ([^|]+?) \|", re.MULTILINE)
DOCTOR: Final = Path(semel.__file__).parent / "cli" / "checks" / "models.json"


def write_for_doctor(page: str) -> None:
    """Write what `semel doctor` reads."""
    DOCTOR.write_text(json.dumps(rows_for_doctor(page), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    write_for_doctor(PAGE.read_text())
