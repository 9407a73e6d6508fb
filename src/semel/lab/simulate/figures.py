"""Figures of a simulated run: counters, times and loads; the same for both levels. Only simulated time is in it.

Of the same seed the JSON is the same, byte for byte.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from semel.lab.simulate.workload import Ask

__all__ = ["Figures", "Flow", "Times"]

_DIGITS: Final = 6


def _times() -> array[float]:
    return array("d")


@dataclass(slots=True)
class Flow:
    """Messages of one kind in one direction."""

    messages: int = 0
    nbytes: int = 0

    def count(self, messages: int, nbytes: int) -> None:
        """So many more messages, with so many bytes in all."""
        self.messages += messages
        self.nbytes += nbytes


@dataclass(frozen=True, slots=True)
class Times:
    """A series, in seconds, or of loads."""

    mean: float
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, series: Sequence[float]) -> Times:
        """Of a series; all zero if nothing is in it."""
        if not series:
            return cls(0.0, 0.0, 0.0, 0.0, 0.0)
        ordered = sorted(series)
        p50, p95, p99 = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.95, 0.99))
        return cls(sum(ordered) / len(ordered), p50, p95, p99, ordered[-1])

    def json(self) -> dict[str, float]:
        """Rounded."""
        return {name: round(getattr(self, name), _DIGITS) for name in ("max", "mean", "p50", "p95", "p99")}


@dataclass(slots=True)
class Figures:
    """The figures of one run."""

    requests: int = 0
    answered: int = 0
    refused: int = 0
    """Refused with a reason."""

    failed_over: int = 0
    """Sent to a second worker."""

    items: int = 0
    """In all requests."""

    encodes: int = 0
    encoder_hits: int = 0
    """Items that the engine did not have to encode, because their output was there or a prefix had them."""

    later_turns: int = 0
    prefix_hits: int = 0
    """Later turns whose engine had the beginning of the prompt."""

    preprocessed: int = 0
    features_sent: int = 0
    feature_bytes: int = 0
    to_workers: defaultdict[str, Flow] = field(default_factory=lambda: defaultdict(Flow))
    to_frontends: defaultdict[str, Flow] = field(default_factory=lambda: defaultdict(Flow))
    """By kind of message."""

    first_token_s: array[float] = field(default_factory=_times)
    whole_s: array[float] = field(default_factory=_times)
    """From the request to its first token, and to its last."""

    loads: array[float] = field(default_factory=_times)
    """Requests at a worker, sampled over workers and time."""

    by_worker: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Requests that each worker was sent."""

    extra: dict[str, float] = field(default_factory=dict)
    """What one level counts and the other does not."""

    _items: set[tuple[str, int]] = field(default_factory=set)
    _conversations: set[int] = field(default_factory=set)

    def ask(self, ask: Ask) -> None:
        """A request has come."""
        self.requests += 1
        self.items += len(ask.items)
        self._items.update((ask.tenant, item.key) for item in ask.items)
        self.later_turns += ask.conversation in self._conversations
        self._conversations.add(ask.conversation)

    @property
    def distinct_items(self) -> int:
        """Items that were shown at least once."""
        return len(self._items)

    def json(self) -> dict[str, Any]:
        """Return all of it, in sorted order."""
        counters = {name: getattr(self, name) for name in _COUNTERS}
        return {
            **dict(sorted(counters.items())),
            "distinct_items": self.distinct_items,
            "encodes_per_item": _ratio(self.encodes, self.distinct_items),
            "encoder_hit_share": _ratio(self.encoder_hits, self.items),
            "prefix_hit_share": _ratio(self.prefix_hits, self.later_turns),
            "preprocessed_per_item": _ratio(self.preprocessed, self.distinct_items),
            "busiest_share": _ratio(max(self.by_worker.values(), default=0), sum(self.by_worker.values())),
            "extra": {name: round(value, _DIGITS) for name, value in sorted(self.extra.items())},
            "first_token_s": Times.of(self.first_token_s).json(),
            "whole_s": Times.of(self.whole_s).json(),
            "loads": Times.of(self.loads).json(),
            "to_workers": _flows(self.to_workers),
            "to_frontends": _flows(self.to_frontends),
        }

    def print_table(self, console: Console, title: str, other: Figures | None = None, heading: str = "") -> None:
        """A table, with those of another run next to it if there is one."""
        table = Table(title=title, title_justify="left")
        table.add_column("")
        table.add_column("semel", justify="right")
        if other is not None:
            table.add_column(heading, justify="right")
        others = None if other is None else other.rows()
        for place, (name, value) in enumerate(self.rows()):
            table.add_row(name, value, *([] if others is None else [others[place][1]]))
        console.print(table)

    def rows(self) -> list[tuple[str, str]]:
        """Return the figures for people: names and values."""
        first, whole, loads = Times.of(self.first_token_s), Times.of(self.whole_s), Times.of(self.loads)
        messages = sum(flow.messages for flow in self.to_frontends.values())
        nbytes = sum(flow.nbytes for flow in self.to_frontends.values())
        return [
            ("requests, answered, refused", f"{self.requests:,}, {self.answered:,}, {self.refused:,}"),
            ("images shown, distinct", f"{self.items:,}, {self.distinct_items:,}"),
            ("encodes, for each image", f"{self.encodes:,}, {_ratio(self.encodes, self.distinct_items):.3f}"),
            ("images that were not encoded again", f"{_ratio(self.encoder_hits, self.items):.1%}"),
            ("later turns with their prefix", f"{_ratio(self.prefix_hits, self.later_turns):.1%}"),
            (
                "preprocessed, for each image",
                f"{self.preprocessed:,}, {_ratio(self.preprocessed, self.distinct_items):.3f}",
            ),
            ("features sent", f"{self.features_sent:,}, {self.feature_bytes / 1e9:,.2f} GB"),
            ("messages to frontends", f"{messages:,}, {nbytes / 1e6:,.1f} MB"),
            ("to the first token, p50 / p95 / p99", _seconds(first)),
            ("to the last token, p50 / p95 / p99", _seconds(whole)),
            ("requests at a worker, mean / p95 / most", f"{loads.mean:.1f} / {loads.p95:.0f} / {loads.max:.0f}"),
        ]


_COUNTERS: Final = (
    "requests",
    "answered",
    "refused",
    "failed_over",
    "items",
    "encodes",
    "encoder_hits",
    "later_turns",
    "prefix_hits",
    "preprocessed",
    "features_sent",
    "feature_bytes",
)


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, _DIGITS) if whole else 0.0


def _seconds(times: Times) -> str:
    return f"{times.p50:.3f} / {times.p95:.3f} / {times.p99:.3f} s"


def _flows(flows: dict[str, Flow]) -> dict[str, dict[str, int]]:
    return {kind: {"bytes": flow.nbytes, "messages": flow.messages} for kind, flow in sorted(flows.items())}
