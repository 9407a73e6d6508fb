"""Names and numbers of pages: metrics, alerts, counts, versions, families and threats."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator
from typing import Final

import yaml

from semel.engine.vllm.compat.versions import TESTED
from semel.lab.testing.models import FAMILIES
from semel.processing import FAMILIES as FAST_FAMILIES
from semel.telemetry.metrics import METRICS
from tools.pages import ROOT, Pages, blank
from tools.start_mistakes import MISTAKES

_WORDS: Final = """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty
"""
NUMBERS: Final = {word: number for number, word in enumerate(_WORDS.split())}
_NUMBER: Final = re.compile(rf"(?<![\w.,])(\d+|{'|'.join(NUMBERS)})\s+", re.IGNORECASE)


def wrong_metrics(pages: Pages) -> Iterator[str]:
    """Metrics of semel's that are not declared, and alerts that no rule has."""
    names, alerts = {metric.name for metric in METRICS}, set(alert_names())
    for page, text in pages.items():
        for name, ends, rest in re.findall(r"\b(semel_[a-z0-9_]+)(?:\{([a-z_,]+)\}(\w*)|[*…])?", text):
            for one in [f"{name}{end}{rest}" for end in ends.split(",")] if name[-1] == "_" else [name]:
                is_prefix = one == name and any(known.startswith(one) for known in names) and name[-1] == "_"
                if not is_prefix and not {one, re.sub(r"_(?:bucket|sum|count)$", "", one)} & names:
                    yield f"{page}: {one}: there is no such metric"
        yield from (
            f"{page}: {one}: no such alert" for one in re.findall(r"`(Semel[A-Z]\w+)`", text) if one not in alerts
        )


def alert_names() -> list[str]:
    """The names of the alert rules."""
    groups = yaml.safe_load((ROOT / "docs/prometheus/alerts.yaml").read_text())["groups"]
    return [rule["alert"] for group in groups for rule in group["rules"]]


def threat_rows() -> set[int]:
    """The numbers of the threats that tests are named after."""
    names = [path.name for path in (ROOT / "tests/security").glob("test_s*.py")]
    return {int(found[1]) for name in names if (found := re.match(r"test_s0?(\d+)_", name))}


def compared_families() -> int:
    """How many families are compared with bare vLLM, by the table that `scripts/families` writes."""
    return len(FAMILIES) - (ROOT / "docs/get-started/models.md").read_text().count("| not compared: ")


def plug_ins() -> int:
    """How many plug-ins the table of the page about them has."""
    table = (ROOT / "docs/internals/encoder.md").read_text().partition("| plug-in |")[2].partition("\n\n")[0]
    return table.count("\n| ")


COUNTS: Final[tuple[tuple[str, Callable[[], set[int]]], ...]] = (
    (r"alert rules|alerts for Prometheus|rules for Prometheus", lambda: {len(alert_names())}),
    (r"tested (?:model )?families", lambda: {compared_families()}),
    (r"of (?:the )?\d+ (?:tested )?families", lambda: {compared_families() - len(FAST_FAMILIES), len(FAST_FAMILIES)}),
    (r"fast (?:model )?families|families (?:that )?have a fast path", lambda: {len(FAST_FAMILIES)}),
    (r"families(?! (?:were|through))", lambda: {compared_families(), len(FAST_FAMILIES), len(FAMILIES)}),
    (r"classes of (?:attacks?|threats?)|attack classes|threat classes|threat rows", lambda: {len(threat_rows())}),
    (r"metrics of semel's|semel metrics|metrics", lambda: {len(METRICS)}),
    (r"typical mistakes|start mistakes|mistakes at a start", lambda: {len(MISTAKES)}),
    (r"supported (?:vLLM )?releases|releases of vLLM", lambda: {len(TESTED)}),
    (r"plug-ins", lambda: {plug_ins()}),
)
"""The noun behind a number, and how many there may be."""


def wrong_counts(pages: Pages) -> Iterator[str]:
    """Numbers of things that there are more or fewer of."""
    for page, text in pages.items():
        prose = blank(text)
        for number in _NUMBER.finditer(prose):
            said, behind = number[1], prose[number.end() : number.end() + 60]
            for noun, count in COUNTS:
                found = re.match(rf"(?:{noun})\b", behind, re.IGNORECASE)
                if found and (NUMBERS.get(said.lower()) or int(said)) not in count():
                    right = " or ".join(map(str, sorted(count())))
                    yield f"{page}: {said} {' '.join(found.group().split())}: there are {right}"


def wrong_versions(pages: Pages) -> Iterator[str]:
    """Releases of vLLM that semel is not tested with, another Python, and a release of semel, which there is not."""
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    for page, text in pages.items():
        for release in re.findall(r"vllm(?:-cpu|'s)?(?:[~=]=| )v?(0\.\d+)", text, re.IGNORECASE):
            if release not in TESTED:
                yield f"{page}: vLLM {release}: tested are {' and '.join(TESTED)}"
        for requirement in re.findall(r"pip install [^`\n]*?(?<![\w./-])(semel\b(?!:)[^\s`]*)", text):
            yield f"{page}: pip install {requirement}: it is not on PyPI, install it from a clone"
        for version, newer in re.findall(r"Python (3\.\d+)( or (?:newer|later)|\+)?", text):
            if int(version[2:]) < int(oldest[2:]) or (newer and version != oldest):
                yield f"{page}: Python {version}{newer}: pyproject.toml says {oldest}"


def wrong_families(page: str) -> Iterator[str]:
    """Families that the page of models has and the code has not, and the reverse."""
    rows = re.findall(r"^\| ([\w.-]+) \(`[\w.-]+`\) \|", page, re.MULTILINE)
    yield from (f"{row}: there is no such family" for row in rows if row not in FAMILIES)
    for name in FAMILIES:
        words = re.sub(r"-|(?<=[a-z])(?=\d)", "[- ]?", name.replace(".", r"\."))
        if not re.search(rf"(?<![\w-]){words}(?![\w-])", page, re.IGNORECASE):
            yield f"{name}: not on the page"


def wrong_threats(pages: Pages) -> Iterator[str]:
    """Rows of threats without tests, and threats without a row."""
    known = threat_rows()
    rows = [
        int(row)
        for row in re.findall(
            r"^\| S(\d+) \|", pages["docs/security/threats.md"].partition("<!-- begin")[0], re.MULTILINE
        )
    ]
    if rows != sorted(known):
        yield f"docs/security/threats.md: rows {rows}, tests {sorted(known)}"
    for page, text in pages.items():
        yield from (
            f"{page}: S{row}: there is no such row"
            for row in re.findall(r"(?<![\w/.-])S(\d{1,2})\b(?!-)", text)
            if int(row) not in known
        )
