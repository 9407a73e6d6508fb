"""Telemetry: every metric in one table, spans, and logs."""

from semel.telemetry.lookups import CacheLookups
from semel.telemetry.meter import Meter, Metric
from semel.telemetry.metrics import METRICS

__all__ = ["METRICS", "CacheLookups", "Meter", "Metric"]
