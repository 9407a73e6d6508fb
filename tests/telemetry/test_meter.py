"""Recording and options metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families

from semel.telemetry import METRICS, Meter, Metric
from semel.telemetry.meter import Sample

VISITS = Metric("semel_visits_total", "counter", "Visits.", ("door",))
GUESTS = Metric("semel_guests", "gauge", "Guests.")


def shown(meter: Meter) -> dict[tuple[str, str], float]:
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(meter.render().decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_counters_add_up_and_gauges_are_set() -> None:
    meter = Meter()
    meter.count(VISITS, "front")
    meter.count(VISITS, "front", amount=2)
    meter.count(VISITS, "back")
    meter.set(GUESTS, 3)
    meter.set(GUESTS, 2)
    assert shown(meter) == {
        ("semel_visits_total", "front"): 3,
        ("semel_visits_total", "back"): 1,
        ("semel_guests", ""): 2,
    }


def test_what_is_watched_is_read_when_someone_looks() -> None:
    value = 1.0

    def read() -> Iterator[Sample]:
        yield VISITS, value, ("front",)
        yield GUESTS, value * 2, ()

    meter = Meter()
    meter.watch(read)
    value = 5.0
    assert shown(meter) == {("semel_visits_total", "front"): 5, ("semel_guests", ""): 10}


def test_the_table_names_every_metric_once_and_with_its_kind() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    borrowed = {"vllm:mm_cache_queries_total", "vllm:mm_cache_hits_total"}  # for dashboards that exist (D8)
    assert all(metric.name.startswith("semel_") for metric in METRICS if metric.name not in borrowed)
    assert all(metric.name.endswith("_total") == (metric.kind == "counter") for metric in METRICS)
