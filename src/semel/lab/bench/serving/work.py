"""The work of a server for requests, by its own counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from semel.lab.bench.serving.bench import Bench, Side
from semel.lab.bench.serving.client import Client
from semel.lab.bench.serving.stages import scrape
from semel.telemetry import metrics
from semel.telemetry.meter import Metric
from semel.vllm_plugin.levels import parse_levels

__all__ = ["Work", "door_work", "semel_work", "vllm_work", "work_of"]

_EVENTS: Final = Metric("semel_vllm_plugin_events_total", "Events inside vLLM's own server, by name.", ("event",))


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a server for requests, by its counters."""

    decoded: float
    preprocessed: float
    encoded: float | None = None
    """None if nobody counts it."""

    sent_bytes: float | None = None
    """Bytes of features that frontends sent to workers; None if nobody counts them."""

    def since(self, before: Work) -> Work:
        """Return what was done after `before`."""
        return Work(
            self.decoded - before.decoded,
            self.preprocessed - before.preprocessed,
            _less(self.encoded, before.encoded),
            _less(self.sent_bytes, before.sent_bytes),
        )


def _less(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before


async def work_of(bench: Bench, side: Side) -> Work:
    """Return the work of a side so far."""
    if side.has_door:
        return await door_work(side)
    return await (vllm_work if side is bench.sides.vllm else semel_work)(side)


async def vllm_work(side: Side) -> Work:
    """vLLM decodes an image to look it up, so every query of its cache is a decode. It does not count encodes."""
    found = await scrape(side.client)
    queries, hits = found.total(metrics.VLLM_MM_CACHE_QUERIES), found.total(metrics.VLLM_MM_CACHE_HITS)
    return Work(queries, queries - hits)


async def semel_work(side: Side) -> Work:
    """By the metrics of its frontend, and of its worker if that was started here."""
    found = await scrape(side.client)
    encoded = None
    if side.server.admin_url is not None:
        async with Client(side.server.admin_url) as admin:
            encoded = (await scrape(admin)).total(metrics.ENCODER_PLANNED)
    return Work(
        found.total(metrics.POOL_DECODED),
        found.total(metrics.POOL_PROCESSED),
        encoded,
        found.total(metrics.FEATURE_BYTES_SENT),
    )


async def door_work(side: Side) -> Work:
    """By what the door adds to vLLM's own metrics. What its pool preprocesses, it decodes too."""
    found, bare = await scrape(side.client), await vllm_work(side)
    made = found.total(_EVENTS, event="preprocessed")
    planned = [name for name, _ in found.samples if name == metrics.ENCODER_PLANNED.name]
    return Work(
        found.total(_EVENTS, event="decodes") + made,
        made if "renderer" in parse_levels(side.levels) else bare.preprocessed,
        found.total(metrics.ENCODER_PLANNED) if planned else None,
    )
