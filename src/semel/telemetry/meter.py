"""Records metrics and exports them to Prometheus.

Each meter has its own registry: two meters in one process never mix, and vLLM, which clears the default registry, does
not affect it. Numbers from elsewhere, such as an engine core, are read on each scrape (`watch`). The metrics of another
registry follow under their own names (`export`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

__all__ = ["Meter", "Metric", "Sample"]


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """A number that semel exports, declared once. The name of a counter ends in `_total`, every name has its unit."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets; other metrics have none."""

    @property
    def kind(self) -> Literal["counter", "gauge", "histogram"]:
        """The type in Prometheus, which follows from the name and the buckets."""
        if self.buckets:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"


_KINDS: Final[Mapping[str, Any]] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}

Sample = tuple[Metric, float, tuple[str, ...]]
"""A metric, its value, and the values of its labels."""


class Meter:
    """Records the metrics of one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._families: dict[Metric, Counter | Gauge | Histogram] = {}
        self._children: dict[tuple[Metric, tuple[str, ...]], Any] = {}
        """By the values of their labels: looking one up in a family takes longer than counting."""

        self._exported: list[_Prefixed] = []
        self._rendering: asyncio.Future[bytes] | None = None

    def count(self, metric: Metric, *labels: str, amount: float = 1) -> None:
        """Add to a counter."""
        (self._children.get((metric, labels)) or self._child(metric, labels)).inc(amount)

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """Set a gauge."""
        (self._children.get((metric, labels)) or self._child(metric, labels)).set(value)

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        """Add a value to a histogram."""
        (self._children.get((metric, labels)) or self._child(metric, labels)).observe(value)

    def _child(self, metric: Metric, labels: tuple[str, ...]) -> Any:
        if (family := self._families.get(metric)) is None:
            buckets = {"buckets": metric.buckets} if metric.kind == "histogram" else {}
            kind = _KINDS[metric.kind]
            family = kind(metric.name, metric.help, metric.labels, registry=self.registry, **buckets)
            self._families[metric] = family
        child = self._children[metric, labels] = family.labels(*labels) if labels else family
        return child

    def watch(self, read: Callable[[], Iterable[Sample]]) -> None:
        """Export numbers from elsewhere: `read` is called on each scrape."""
        self.registry.register(_Watcher(read))

    def export(self, registry: Collector, *, prefix: str) -> None:
        """Let a scrape also show the metrics of another registry whose names begin with `prefix`."""
        self._exported.append(_Prefixed(registry, prefix))

    def render(self) -> bytes:
        """Return the meter's own metrics in the Prometheus text format."""
        return generate_latest(self.registry)

    async def scrape(self) -> bytes:
        """Return all metrics, those of other registries included.

        What is watched is read on the event loop, where it changes. Other registries are safe to read from a thread,
        and may be large; scrapes that meet share one rendering of them.
        """
        own = self.render()
        if not self._exported:
            return own
        if self._rendering is None or self._rendering.done():
            self._rendering = asyncio.ensure_future(asyncio.to_thread(self._render_exported))
        return own + await asyncio.shield(self._rendering)

    def _render_exported(self) -> bytes:
        return b"".join(generate_latest(one) for one in self._exported)


class _Prefixed(Collector):
    """The metrics of a registry whose names begin with a prefix.

    With PROMETHEUS_MULTIPROC_DIR set, a registry still tells the numbers of its own process. Those of all processes
    would count every worker of a host at each of them.
    """

    def __init__(self, registry: Collector, prefix: str) -> None:
        self._registry = registry
        self._prefix = prefix

    def collect(self) -> Iterator[Family]:
        return (family for family in self._registry.collect() if family.name.startswith(self._prefix))


class _Watcher(Collector):
    def __init__(self, read: Callable[[], Iterable[Sample]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Family]:
        return ()

    def collect(self) -> Iterator[Family]:
        families: dict[Metric, CounterMetricFamily | GaugeMetricFamily] = {}
        for metric, value, labels in self._read():
            if metric not in families:
                kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                families[metric] = kind(metric.name, metric.help, labels=metric.labels)
            families[metric].add_metric(labels, value)
        yield from families.values()
