"""The table of docs/api/clients.md. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tools.client_comparison import REQUESTS, Verdict

HEAD = (
    f"| client | version | API | {' | '.join(REQUESTS)} |",
    f"|---|---|---|{'---|' * len(REQUESTS)}",
)


@dataclass(frozen=True)
class Row:
    """What one client made of one API."""

    client: str
    version: str
    api: str
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    note: str = ""
    """Why there is nothing to compare, if there is not."""

    @property
    def is_right(self) -> bool:
        """Whether nothing differs but what is listed."""
        return not any(verdict.wrong for verdict in self.verdicts.values())


def lines_of(rows: Iterable[Row]) -> list[str]:
    """The table, and under it the reasons that its cells point to."""
    reasons: dict[str, int] = {}
    table = [_line(row, reasons) for row in rows]
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    return [*HEAD, *table, *(["", *notes] if notes else [])]


def wrong_lines(rows: Iterable[Row]) -> list[str]:
    """What differs and is not listed, in words: bare vLLM's value, then semel's. Every request is to be answered."""
    return [
        f"{row.client} {row.api} {request}: {line}"
        for row in rows
        for request, verdict in row.verdicts.items()
        for line in (*verdict.wrong, *([f"both refuse: {verdict.refusal}"] if verdict.refusal else []))
    ]


def replace_rows(page: str, lines: Sequence[str]) -> str:
    """The page with another table."""
    begin, end = "<!-- begin table -->\n", "<!-- end table -->\n"
    before, _, rest = page.partition(begin)
    _, _, behind = rest.partition(end)
    return before + begin + "\n".join(lines) + "\n" + end + behind


def _line(row: Row, reasons: dict[str, int]) -> str:
    head = f"| `{row.client}` | {row.version} | {row.api} |"
    if row.note:
        return f"{head} {row.note} |{' |' * (len(REQUESTS) - 1)}"
    return f"{head} {' | '.join(_cell(row.verdicts.get(one), reasons) for one in REQUESTS)} |"


def _cell(verdict: Verdict | None, reasons: dict[str, int]) -> str:
    if verdict is None:
        return ""
    if verdict.wrong:
        return f"**{len(verdict.wrong)} differ**"
    if verdict.refusal:
        return "both refuse"
    marks = ", ".join(str(reasons.setdefault(reason, len(reasons) + 1)) for reason in verdict.reasons)
    found = f"{verdict.fields} equal" if verdict.fields else "vLLM refuses"
    return found + (f" ({marks})" if marks else "")
