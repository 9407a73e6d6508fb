"""The metrics of a process at one moment, parsed from the Prometheus text format. No I/O.

Rates need two scrapes; quantiles come from the bucket counts between the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

from semel.telemetry.meter import Metric

__all__ = ["Scrape", "quantile"]

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Scrape:
    """The samples of one process."""

    samples: Mapping[tuple[str, Labels], float]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the Prometheus text format."""
        return cls(
            {
                (sample.name, tuple(sorted(sample.labels.items()))): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
        )

    def total(self, metric: Metric, **labels: str) -> float:
        """Return the sum of all samples with these labels."""
        return sum(value for _, value in self._of(metric.name, labels))

    def values(self, metric: Metric, label: str) -> dict[str, float]:
        """Return the sum for each value of a label."""
        sums: dict[str, float] = {}
        for found, value in self._of(metric.name, {}):
            sums[found[label]] = sums.get(found[label], 0.0) + value
        return sums

    def states(self, metric: Metric, label: str, of: str) -> dict[str, str]:
        """Return the value of a label by that of another one, of samples that are 1."""
        return {found[of]: found[label] for found, value in self._of(metric.name, {}) if value}

    def buckets(self, metric: Metric, **labels: str) -> dict[float, float]:
        """Return the number of a histogram's values at or below each bound."""
        counts: dict[float, float] = {}
        for found, value in self._of(f"{metric.name}_bucket", labels):
            bound = float(found["le"])
            counts[bound] = counts.get(bound, 0.0) + value
        return counts

    def _of(self, name: str, labels: Mapping[str, str]) -> Iterator[tuple[dict[str, str], float]]:
        for (its_name, pairs), value in self.samples.items():
            if its_name == name and (found := dict(pairs)).items() >= labels.items():
                yield found, value


def quantile(q: float, before: Mapping[float, float], after: Mapping[float, float]) -> float | None:
    """Return the quantile of the values that a histogram received between two scrapes; None without any.

    Values are assumed to be evenly distributed within a bucket, as in Prometheus; beyond the last bound, it is that
    bound.
    """
    counts = [(bound, after[bound] - before.get(bound, 0.0)) for bound in sorted(after)]
    if not counts or counts[-1][1] <= 0:
        return None
    rank = q * counts[-1][1]
    low, below = 0.0, 0.0
    for bound, count in counts:
        if count >= rank and count > below:
            return low if bound == inf else low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    return low
