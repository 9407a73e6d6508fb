"""What semel tells about itself: every metric in one table, spans, and the log."""

from semel.telemetry.lookups import CacheLookups
from semel.telemetry.meter import Meter
from semel.telemetry.metrics import METRICS, Metric

__all__ = ["METRICS", "CacheLookups", "Meter", "Metric"]
