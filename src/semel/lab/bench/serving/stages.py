"""semel's time by stage, from its own metrics."""

from __future__ import annotations

from semel.lab.bench.serving.client import Client
from semel.lab.bench.serving.figures import Row, counted
from semel.telemetry import metrics
from semel.telemetry.meter import Metric
from semel.telemetry.scrape import Scrape

__all__ = ["scrape", "stage_rows"]

_SECONDS, _TIMES = (
    Metric(f"{metrics.STAGE_SECONDS.name}_{part}", metrics.STAGE_SECONDS.help, metrics.STAGE_SECONDS.labels)
    for part in ("sum", "count")
)


async def scrape(client: Client) -> Scrape:
    """Return the current metrics of a frontend."""
    return Scrape.parse(await client.read("/metrics"))


def stage_rows(prefix: str, before: Scrape, after: Scrape) -> list[Row]:
    """Return the mean duration of each stage between the two scrapes, for stages that were entered."""
    rows = []
    for stage, times in after.values(_TIMES, "stage").items():
        entered = times - before.total(_TIMES, stage=stage)
        if entered > 0:
            seconds = after.total(_SECONDS, stage=stage) - before.total(_SECONDS, stage=stage)
            rows.append(counted(f"{prefix} {stage}, mean", "ms", seconds / entered * 1e3))
    return rows
