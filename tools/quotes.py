"""Figures that are defined on one page and quoted on others: `scripts/quote` rewrites the quotes.

`<!-- figure NAME -->VALUE<!-- /figure -->` on a page under `docs/` defines a figure, in the section of the command that
measures it. `<!-- quote NAME -->VALUE<!-- /quote -->` repeats it, in the README or on any page. Neither counts in code.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Final

from tools.pages import CODE, ROOT, blank, read_pages

__all__ = ["faults", "requote"]

FIGURE: Final = re.compile(r"<!-- figure ([\w.-]+) -->(.*?)<!-- /figure -->", re.DOTALL)
QUOTE: Final = re.compile(r"(<!-- quote ([\w.-]+) -->)(.*?)(<!-- /quote -->)", re.DOTALL)
OPENING: Final = re.compile(r"<!-- (figure|quote)\b")
COMMAND: Final = re.compile(r"(?:^|[`\n$ ])(?:semel|scripts/[\w-]+|python -m|pytest) ?")


def defined(pages: Mapping[str, str]) -> dict[str, list[tuple[str, str]]]:
    """Pages and values of each name's definitions."""
    found: dict[str, list[tuple[str, str]]] = {}
    for page, text in pages.items():
        for name, value in FIGURE.findall(blank(text)):
            found.setdefault(name, []).append((page, value))
    return found


def requote(pages: Mapping[str, str]) -> dict[str, str]:
    """The pages with every quote as its figure is defined; a quote of no figure stays."""
    values = {name: ones[0][1] for name, ones in defined(pages).items()}
    changed = {}
    for page, text in pages.items():
        pieces, end = [], 0
        for match in QUOTE.finditer(blank(text)):
            pieces += [text[end : match.start()], f"{match[1]}{values.get(match[2], match[3])}{match[4]}"]
            end = match.end()
        changed[page] = "".join([*pieces, text[end:]])
    return changed


def faults(pages: Mapping[str, str]) -> Iterator[str]:
    """Everything that is wrong with the figures and quotes of some pages."""
    figures = defined(pages)
    for name, ones in figures.items():
        if len(ones) > 1:
            yield f"{name}: defined {len(ones)} times: {', '.join(page for page, _ in ones)}"
        yield from (f"{page}: {name}: define it under docs/" for page, _ in ones if not page.startswith("docs/"))
    for page, text in pages.items():
        bare = blank(text)
        if len(OPENING.findall(bare)) != len(FIGURE.findall(bare)) + len(QUOTE.findall(bare)):
            yield f"{page}: a figure or a quote is not closed, or has no name"
        for _, name, value, _ in QUOTE.findall(bare):
            if name not in figures:
                yield f"{page}: {name}: quoted, and defined nowhere"
            elif value != figures[name][0][1]:
                yield f"{page}: {name}: {value} is quoted, {figures[name][0][1]} is defined: run scripts/quote"
        for start, section in _sections(text, bare):
            names = [match[1] for match in FIGURE.finditer(bare[start : start + len(section)])]
            if names and not any(COMMAND.search(code) for code in CODE.findall(section)):
                yield f"{page}: {', '.join(names)}: no command in this section measures it"


def _sections(text: str, bare: str) -> Iterator[tuple[int, str]]:
    """The sections between headings of any level, and where each begins."""
    starts = [0, *(match.start() for match in re.finditer(r"^#+ ", bare, re.MULTILINE))]
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        yield start, text[start:end]


def main() -> None:
    """Rewrite the quotes of README and docs, and say which pages changed."""
    pages = read_pages()
    for page, text in requote(pages).items():
        if text != pages[page]:
            (ROOT / page).write_text(text)
            sys.stdout.write(f"{page}\n")
    sys.exit("\n".join(faults(read_pages())) or None)


if __name__ == "__main__":
    main()
