"""The tables of docs/models.md that `scripts/families --write` writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from semel.processing.processor import choose_processor
from tests.engine.family_parity import Parity

__all__ = ["HEAD", "path_of", "replace_rows", "replace_section", "row_of"]

HEAD: Final = (
    "| family | modalities, most in a prompt | processor | answers as bare vLLM's | control | lies | image sizes |",
    "|---|---|---|---|---|---|---|",
)


def row_of(family: str, config: Mapping[str, Any], found: Parity | str) -> str:
    """The row of a family."""
    name, path = f"| {family} (`{config['model_type']}`)", path_of(config)
    if isinstance(found, str):
        return f"{name} | | {path} | {found} | | | |"
    modalities = ", ".join(f"{modality} {limit}" for modality, limit in found.modalities.items())
    equal = f"{found.equal} of {found.questions} with {found.items} items"
    control = "seen" if found.is_control_seen else "NOT SEEN"
    sizes = f"{found.sizes - len(found.refused_sizes)} of {found.sizes}" if found.sizes else ""
    return f"{name} | {modalities} | {path} | {equal} | {control} | {_counted(found.lies)} | {sizes} |"


def path_of(config: Mapping[str, Any]) -> str:
    """Whose processor makes the features with `--processor auto`."""
    return "fast" if choose_processor("auto", config) == "hf" else "generic"


def _counted(lies: Mapping[str, str]) -> str:
    outcomes = [*lies.values()]
    return ", ".join(f"{outcomes.count(kind)} {kind}" for kind in dict.fromkeys(sorted(outcomes, reverse=True)))


def replace_rows(page: str, rows: Mapping[str, str]) -> str:
    """The page with these rows, by family, in its table of families; rows of other families stay."""
    lines = page.splitlines()
    start = lines.index(HEAD[1]) + 1
    end = next(index for index in range(start, len(lines) + 1) if not lines[index : index + 1] or lines[index] == "")
    table = {**{_family(line): line for line in lines[start:end]}, **rows}
    return "\n".join([*lines[:start], *(table[family] for family in sorted(table)), *lines[end:]]) + "\n"


def replace_section(page: str, name: str, lines: Iterable[str]) -> str:
    """The page with these lines between the marks of a section."""
    begin, end = (f"<!-- {mark} {name} -->\n" for mark in ("begin", "end"))
    before, _, rest = page.partition(begin)
    _, _, behind = rest.partition(end)
    return before + begin + "\n".join(lines) + "\n" + end + behind


def _family(line: str) -> str:
    return line.removeprefix("| ").partition(" ")[0]
