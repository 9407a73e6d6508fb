"""The results of a scenario: rows of figures of both sides, compared with their limits. Pure.

A limit applies to the ratio to bare vLLM in the same run, or to semel's own figure. A row without one only informs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from semel.lab.bench.report import Check
from semel.lab.bench.serving.alternate import Pair
from semel.lab.bench.serving.statistics import Figure, exactly, median_of, ratio_of, slope_of, slope_ratio

__all__ = [
    "DOOR_TARGETS",
    "LIMITS",
    "TARGETS",
    "Limit",
    "Row",
    "checks_of",
    "compared",
    "counted",
    "grown",
    "with_door",
]


@dataclass(frozen=True, slots=True)
class Limit:
    """The limit of a figure."""

    of: Literal["ratio", "semel"]
    kind: Literal["at most", "at least"]
    value: float

    def is_kept(self, value: float) -> bool:
        """Return whether a figure is within the limit."""
        return value <= self.value if self.kind == "at most" else value >= self.value


LIMITS: Final[dict[str, Limit]] = {
    "text: latency": Limit("ratio", "at most", 1.15),
    "again: 1024, what the image adds": Limit("ratio", "at most", 0.65),
    "again: HD, what the image adds": Limit("ratio", "at most", 0.55),
    "render: 16 new images at a time, per image": Limit("ratio", "at most", 0.40),
    "frontends: tensor bytes between processes, per repeat": Limit("semel", "at most", 0.0),
    "generate: repeat, next to vLLM's with tensors": Limit("ratio", "at most", 0.25),
    "generate: repeat, next to vLLM's by hash": Limit("ratio", "at most", 1.0),
    "generate: body, next to vLLM's with tensors": Limit("semel", "at most", 8_192.0),
    "mixed: good requests that fail": Limit("semel", "at most", 0.0),
    "saturation: text requests per second": Limit("ratio", "at least", 0.85),
    "agent: per image of history, data URLs": Limit("ratio", "at most", 0.15),
    "agent: per image of history, by reference, next to the engine in process": Limit("ratio", "at most", 1.3),
    "agent: bytes sent, by reference": Limit("ratio", "at most", 0.05),
    "agent: bytes sent, previous_response_id": Limit("ratio", "at most", 0.05),
    "agent: images not decoded, preprocessed and encoded once": Limit("semel", "at most", 0.0),
    "evicted: 1024, what the eviction adds": Limit("ratio", "at most", 0.05),
    "evicted: HD, what the eviction adds": Limit("ratio", "at most", 0.05),
    "evicted: encodes of images that were encoded before": Limit("semel", "at most", 0.0),
    "restart: HD, what the restart adds": Limit("semel", "at most", 10.0),
    "restart: a fetch and its copies, mean": Limit("semel", "at most", 10.0),
    "restart: encodes of published images": Limit("semel", "at most", 0.0),
    "video: what a repeat adds": Limit("ratio", "at most", 0.10),
    "video: decodes for five questions": Limit("semel", "at most", 1.0),
    "memory: all processes (PSS)": Limit("ratio", "at most", 1.3),
    "memory: how far off the prediction is": Limit("semel", "at most", 10.0),
}
"""The limits by the names of rows: any machine keeps them, and `semel verify` holds it to them."""

TARGETS: Final[dict[str, Limit]] = {
    "text: latency": Limit("ratio", "at most", 1.05),
    "text: serving CPU, 16 at a time": Limit("ratio", "at most", 1.2),
    "text: context switches, 1 at a time": Limit("semel", "at most", 17.0),
    "answers: not streamed, 1 at a time, serving CPU": Limit("ratio", "at most", 1.15),
    "answers: not streamed, 16 at a time, serving CPU": Limit("ratio", "at most", 1.15),
    "again: 1024, what the image adds beyond the engine in process": Limit("semel", "at most", 1.8),
    "again: HD, what the image adds beyond the engine in process": Limit("semel", "at most", 2.4),
    "again: HD, what the image adds": Limit("ratio", "at most", 0.13),
    "again: HD, serving CPU that the image adds": Limit("ratio", "at most", 0.18),
    "saturation: text requests per second": Limit("ratio", "at least", 0.95),
    "saturation: text requests, CPU time of all processes": Limit("ratio", "at most", 1.06),
}
"""What a quiet machine should show: stricter than a limit of the same name, and judged in its place."""

DOOR_TARGETS: Final[dict[str, Limit]] = {
    "text: serving CPU, 1 at a time": Limit("ratio", "at most", 1.01),
    "text: serving CPU, 16 at a time": Limit("ratio", "at most", 1.01),
    "again: 1024, serving CPU": Limit("ratio", "at most", 0.5),
    "again: HD, serving CPU": Limit("ratio", "at most", 0.4),
    "agent: images not decoded, preprocessed and encoded once": Limit("semel", "at most", 0.0),
    "render: 16 new images at a time, per image": Limit("ratio", "at most", 0.83),
    "render: 16 new images at a time, busiest thread per image": Limit("ratio", "at most", 0.15),
    "mixed: good requests that fail": Limit("semel", "at most", 0.0),
}
"""What vLLM's own server should show with semel inside."""


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity, measured on both sides."""

    name: str
    """`SCENARIO: WHAT`."""

    unit: str
    semel: Figure
    vllm: Figure | None = None
    ratio: Figure | None = None
    turns: Pair[list[float]] | None = None
    """The measurements in their order, if the figure is of how they grow."""

    is_promised: bool = False
    """Whether it is judged by the limit that any machine keeps, instead of a target."""

    is_door: bool = False
    """Whether vLLM's server with the door stands in semel's place. Among a report's rows: only the door has it."""

    door: Row | None = None
    """The same quantity with the door, in turns with bare vLLM too."""

    @property
    def scenario(self) -> str:
        """The scenario that it belongs to."""
        return self.name.partition(":")[0]

    @property
    def is_stage(self) -> bool:
        """Return whether it only says where semel's time goes."""
        return ", stage " in self.name

    @property
    def limit(self) -> Limit | None:
        """Its target, else its limit, if it has one."""
        if self.is_door:
            return DOOR_TARGETS.get(self.name)
        limit = LIMITS.get(self.name)
        return limit if self.is_promised else TARGETS.get(self.name, limit)

    @property
    def judged(self) -> Figure | None:
        """The figure that the limit applies to."""
        if self.limit is None:
            return None
        return self.semel if self.limit.of == "semel" else self.ratio

    @property
    def ok(self) -> bool | None:
        """Return whether it is within its limit; None without a limit or without the figure."""
        return None if self.limit is None or self.judged is None else self.limit.is_kept(self.judged.value)

    @property
    def is_sure(self) -> bool:
        """Return whether the whole interval is on the same side of the limit."""
        if self.limit is None or self.judged is None:
            return False
        return self.limit.is_kept(self.judged.low) == self.limit.is_kept(self.judged.high)


def compared(name: str, unit: str, turns: Pair[list[float]]) -> Row:
    """Return a row of medians and their ratio."""
    return Row(name, unit, median_of(turns.semel), median_of(turns.vllm), ratio_of(turns.semel, turns.vllm))


def grown(name: str, unit: str, turns: Pair[list[float]]) -> Row:
    """Return a row of slopes and their ratio: by how much a measurement grows from turn to turn."""
    ratio = slope_ratio(turns.semel, turns.vllm)
    return Row(name, unit, slope_of(turns.semel), slope_of(turns.vllm), ratio, turns)


def counted(name: str, unit: str, semel: float, vllm: float | None = None) -> Row:
    """A row of counts; with their ratio if the other count is not zero."""
    ratio = exactly(semel / vllm) if vllm else None
    return Row(name, unit, exactly(semel), None if vllm is None else exactly(vllm), ratio)


def with_door(rows: Sequence[Row], of_door: Sequence[Row]) -> list[Row]:
    """Return the rows, in each the row of the same name with the door, and then those that only the door has."""
    found = {row.name: replace(row, is_door=True) for row in of_door}
    both = [replace(row, door=found.pop(row.name, None)) for row in rows]
    return [*both, *found.values()]


def _check_of(row: Row) -> Check:
    """Return a row as a check, in the common form of benchmarks."""
    limit, judged = row.limit, row.judged
    name = f"{row.name}, with the door" if row.is_door else row.name
    if limit is None or judged is None:
        return Check(name, row.semel.value, row.unit, None if row.vllm is None else row.vllm.value)
    unit = row.unit if limit.of == "semel" else "×"
    baseline = None if limit.of == "ratio" or row.vllm is None else row.vllm.value
    return Check(name, judged.value, unit, baseline, limit.value, limit.is_kept(judged.value))


def checks_of(rows: Sequence[Row]) -> tuple[Check, ...]:
    """Return all rows as checks."""
    return tuple(_check_of(one) for row in rows for one in (row, row.door) if one is not None)
