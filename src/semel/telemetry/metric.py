"""What a metric is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Metric"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that semel exports. The name of a counter ends in `_total`, and every name has its unit."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""
