"""Words of the pages, and the shape of all of them together."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Final

from tools.pages import LINK, Pages, blank

BANNED: Final[Mapping[str, str]] = {
    r"dear(?:er|est|ly)?": "expensive",
    r"mend(?:s|ed|ing)?": "fix",
    r"fore(?:told|tells?)": "predicted",
    r"beside": "next to, compared with",
    r"whoever": "a client that, any",
    r"processor time": "CPU time",
    r"pictures?": "image",
    r"(?:is|are|was|were|be|been) told": "reported, gets",
    r"takes? turns|taking turns|(?:by|in) turns": "fair queueing, alternately",
    r"desk": "intake",
    r"shel(?:f|ves)": "host cache",
    r"keepers?": "embedding sync",
    r"bulletins?": "state delta",
    r"news": "cache updates",
    r"ghosts?": "stub",
    r"condemn(?:s|ed|ing)?": "quarantine",
    r"vouch(?:es|ed|ing)?": "preapprove",
}
"""Phrases that a reader does not search for, and what to write instead."""

NO_GPU: Final = re.compile(
    r"(?:nobody|no one|never|not)\b[^.|:]{0,40}\b(?:run|ran|tested|tried|measured|started)\b[^.|:]{0,30}\bGPUs?\b"
    r"|\bGPUs?\b[^.:]{0,30}\b(?:nobody|no one|never|not)\b (?:been |yet )?(?:run|ran|tested|tried|measured)\b"
    r"|\bno GPU is part of the tests|\bno GPU (?:results|figures)|any test or figure on a GPU",
    re.IGNORECASE,
)
STATUS_LINES: Final = 20
"""The README's status stands within so many lines."""


def banned_phrases(pages: Pages) -> Iterator[str]:
    """Phrases of BANNED outside code, links and comments."""
    for page, text in pages.items():
        prose = re.sub(
            r"\]\([^)]*\)|https?://\S+|<!--.*?-->", lambda found: "\n" * found.group().count("\n"), blank(text)
        )
        for number, line in enumerate(prose.splitlines(), 1):
            for phrase, better in BANNED.items():
                for found in re.findall(rf"\b(?:{phrase})\b", line, re.IGNORECASE):
                    yield f"{page}:{number}: {found!r}: write {better}"


def second_statuses(pages: Pages) -> Iterator[str]:
    """Sentences that say that no GPU ran it, but the README's first."""
    for page, text in pages.items():
        for seen, found in enumerate(NO_GPU.finditer(text)):
            line = text.count("\n", 0, found.start()) + 1
            if page != "README.md" or line > STATUS_LINES or seen:
                yield f"{page}:{line}: {' '.join(found.group().split())!r}: the README's status line says it once"


MAX_PAGES: Final = 42
MAX_README_LINES: Final = 120


def out_of_shape(pages: Pages, nav: str) -> Iterator[str]:
    """Too many pages, too long a README, pages that are not in the nav or further than two links from the README."""
    docs = [page for page in pages if page.startswith("docs/")]
    if len(docs) > MAX_PAGES:
        yield f"docs/ has {len(docs)} pages; at most {MAX_PAGES}"
    if (lines := len(pages["README.md"].splitlines())) > MAX_README_LINES:
        yield f"README.md has {lines} lines; at most {MAX_README_LINES}"
    near = _linked(pages, {"README.md"})
    reached = near | _linked(pages, near)
    yield from (f"{page}: not within two links of the README" for page in docs if page not in reached)
    yield from (f"{page}: not in the nav of mkdocs.yml" for page in docs if not re.search(rf"\W{page[5:]}\b", nav))


def _linked(pages: Pages, sources: set[str]) -> set[str]:
    return {
        posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
        for page in sources & pages.keys()
        for target in LINK.findall(blank(pages[page]))
    }
