"""The page that a run ends with: Markdown for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles
from typing import Any, Final

from semel.lab.prove.driver import Outcome, Tally
from semel.lab.prove.work import Memory, Work

__all__ = ["Check", "Page", "checks_of"]

_OUTCOMES: Final[Mapping[Outcome, str]] = {
    "answered": "answered whole, every token as expected",
    "streamed": "streamed to the end, every token as expected",
    "refused": "refused, as it had to be",
    "aborted": "left by the client, as planned",
    "tie": "answered, not compared: the reference has two equally likely tokens",
    "stream ended": "streams that had begun and were cut, right until then",
    "failed": "**failed**: valid, and not answered",
    "different": "**different** from the reference",
    "admitted": "**answered, though it had to be refused**",
}
_ITEM_WORK: Final = ("fetched", "decoded", "preprocessed", "sent", "encoded", "loaded", "repaired")
_MAX_SENT: Final = 0.9
"""Of places of items in requests; without a ledger every one is sent, under repair again."""

_MAX_GAP_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Check:
    """A figure and the most that it may be."""

    name: str
    value: float
    limit: float

    @property
    def ok(self) -> bool:
        """Return whether the limit is kept."""
        return self.value <= self.limit


@dataclass(slots=True)
class Page:
    """What a run found."""

    run: Mapping[str, Any]
    """How it can be repeated: seed, sizes, transport, model."""

    host: Mapping[str, Any]
    tally: Tally
    work: Work
    memory: Memory
    faults: Mapping[str, int] = field(default_factory=dict)
    broken: int = 0
    """Faults after which the fleet was not whole again."""

    found_made: int = 0
    """New items that a tenant found made for another one."""

    fetched_from_server: int = 0
    questions: int = 0
    ties: int = 0

    @property
    def checks(self) -> list[Check]:
        """The figures that have a limit."""
        return [
            *checks_of(self.tally, self.work),
            Check("new items that a tenant found made for another", self.found_made, 0),
            Check("faults that the fleet did not get over", self.broken, 0),
        ]

    @property
    def ok(self) -> bool:
        """Return whether all limits are kept."""
        return all(check.ok for check in self.checks)

    def to_json(self) -> str:
        """Return the page as one JSON object."""
        found = {
            "prove": 1,
            "ok": self.ok,
            "run": dict(self.run),
            "checks": [asdict(check) | {"ok": check.ok} for check in self.checks],
            "outcomes": dict(self.tally.outcomes),
            "wrong": self.tally.faults,
            "differing_tokens": self.tally.differing_tokens,
            "sent_again": self.tally.sent_again,
            "bytes_again": self.tally.bytes_again,
            "items": len(self.tally.pairs),
            "places": self.tally.items,
            "work": asdict(self.work) | {"fetched_from_server": self.fetched_from_server},
            "latency_s": self._latencies(),
            "longest_gap_s": round(self.tally.longest_gap_s, 2),
            "seconds": round(self.tally.seconds, 1),
            "memory": asdict(self.memory),
            "faults": dict(self.faults),
            "questions": self.questions,
            "ties": self.ties,
            "host": dict(self.host),
        }
        return json.dumps(found, indent=1, allow_nan=False) + "\n"

    def to_markdown(self) -> str:
        """Return the page for people."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        wrong = [check.name for check in self.checks if not check.ok]
        verdict = f"Not proven: {', '.join(wrong)}" if wrong else "Nothing lost, nothing wrong"
        yield f"# semel prove\n\n**{verdict}.**\n"
        yield f"{self.tally.ended:,} requests in {self.tally.seconds:,.0f} s, {sum(self.faults.values())} faults.\n"
        yield "| outcome | requests |\n|---|---|"
        for outcome, meaning in _OUTCOMES.items():
            yield f"| {meaning} | {self.tally.outcomes[outcome]:,} |"
        yield "\n| figure | value | at most | |\n|---|---|---|---|"
        for check in self.checks:
            yield f"| {check.name} | {check.value:,.4g} | {check.limit:g} | {'✓' if check.ok else '✗'} |"
        yield from self._figures()
        yield from self._work()
        if self.faults:
            yield "\n| fault | times |\n|---|---|"
            yield from (f"| {name} | {count} |" for name, count in sorted(self.faults.items()))
        if self.tally.faults:
            yield "\n## Wrong"
            yield from (f"- {line}" for line in self.tally.faults)
        yield "\n## Run"
        yield from (f"- {name}: {value}" for name, value in (*self.run.items(), *self.host.items()))

    def _figures(self) -> Iterator[str]:
        yield f"| requests sent again after a reset | {self.tally.sent_again:,} | | |"
        yield f"| names sent again with their image | {self.tally.bytes_again:,} | | |"
        yield f"| questions with a tie, of {self.questions} | {self.ties} | | |"
        for name, seconds in self._latencies().items():
            yield f"| latency, {name} | {seconds:.3f} s | | |"
        for name, nbytes in asdict(self.memory).items():
            yield f"| memory of all processes, {name.removesuffix('_bytes')} | {nbytes / 1e9:.2f} GB | | |"

    def _work(self) -> Iterator[str]:
        """Yield a table of the work by the processes' counters: what a killed one counted last may be missing."""
        items, places = max(1, len(self.tally.pairs)), max(1, self.tally.items)
        yield f"\n| work for {items:,} items, shown {places:,} times | total | per item | per showing |"
        yield "|---|---|---|---|"
        rows = {name: getattr(self.work, name) for name in _ITEM_WORK}
        for name, value in (rows | {"fetched, as the server of images counts": self.fetched_from_server}).items():
            yield f"| {name} | {value:,.0f} | {value / items:.2f} | {value / places:.3f} |"
        yield f"| sent, MB | {self.work.sent_bytes / 1e6:,.1f} | | |"
        yield f"| answers taken over by another worker | {self.work.failovers:,.0f} | | |"
        yield f"| submissions repeated for a lost item | {self.work.resubmitted:,.0f} | | |"

    def _latencies(self) -> dict[str, float]:
        values = self.tally.latencies_s
        if len(values) < 2:
            return {}
        return {"median": median(values), "p99": quantiles(values, n=100)[-1], "longest": max(values)}


def checks_of(tally: Tally, work: Work) -> list[Check]:
    """Return the figures that have a limit."""
    return [
        Check("valid requests that failed", tally.outcomes["failed"], 0),
        Check("tokens that differ", tally.differing_tokens + tally.outcomes["different"], 0),
        Check("requests answered that had to be refused", tally.outcomes["admitted"], 0),
        Check("items sent, per showing", work.sent / max(1, tally.items), _MAX_SENT),
        Check("longest time without an answer, s", tally.longest_gap_s, _MAX_GAP_S),
    ]
