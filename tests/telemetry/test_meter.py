"""Recording and options metrics."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections import Counter as Tally
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from semel.telemetry import METRICS, Meter, Metric
from tests.waiting import until

VISITS = Metric("semel_visits_total", "Visits.", ("door",))


def shown(meter: Meter) -> dict[tuple[str, str], float]:
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(meter.render().decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_the_table_names_every_metric_once_and_with_its_kind() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    borrowed = {"vllm:mm_cache_queries_total", "vllm:mm_cache_hits_total"}  # for dashboards that exist (D8)
    assert all(metric.name.startswith("semel_") for metric in METRICS if metric.name not in borrowed)
    shaped = {kind: sum(metric.kind == kind for metric in METRICS) for kind in ("counter", "gauge", "histogram")}
    assert shaped["histogram"] == sum(bool(metric.buckets) for metric in METRICS) > 0
    assert shaped["counter"] == sum(name.endswith("_total") for name in names) > 0


async def test_metrics_of_another_registry_follow_under_their_own_names_and_only_those_with_the_prefix() -> None:
    meter, engines = Meter(), CollectorRegistry()
    meter.count(VISITS, "front")
    Counter("engine:steps", "Steps.", ["model_name", "engine"], registry=engines).labels("m", "0").inc(3)
    Gauge("semel_guests", "Another's, by the same name.", registry=engines).set(9)
    assert b"engine:" not in await meter.scrape(), "nobody asked for them yet"
    meter.export(engines, prefix="engine:")
    text = (await meter.scrape()).decode()
    assert 'engine:steps_total{engine="0",model_name="m"} 3.0' in text
    assert "semel_guests" not in text
    families = Tally(family.name for family in text_string_to_metric_families(text))
    assert set(families.values()) == {1}, "a name that appears twice makes the whole page unreadable"


class SlowRegistry(CollectorRegistry):
    """Takes as long as the test wants to be read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.release = threading.Event()
        self.within_s = 10.0

    def collect(self) -> Iterator[Family]:
        self.reads += 1
        assert self.release.wait(self.within_s), "the event loop did not go on"
        yield from super().collect()


async def test_another_registry_is_read_beside_the_event_loop_and_once_for_scrapes_that_meet() -> None:
    """Control: read on the loop, it waits for itself."""
    meter, slow = Meter(), SlowRegistry()
    meter.export(slow, prefix="engine:")
    scrapes = [asyncio.create_task(meter.scrape()) for _ in range(20)]
    await until(lambda: slow.reads > 0)
    slow.release.set()
    await asyncio.gather(*scrapes)
    assert slow.reads == 1
    await meter.scrape()
    assert slow.reads == 2, "the next one is not given what is old"
    slow.release.clear()
    slow.within_s = 0.01
    with pytest.raises(AssertionError, match="did not go on"):
        meter._render_exported()


SEVERAL_PROCESSES = """
import asyncio
from prometheus_client import REGISTRY, CollectorRegistry, Counter
from prometheus_client.multiprocess import MultiProcessCollector
from semel.telemetry import Meter, Metric
meter, of_all = Meter(), CollectorRegistry()
MultiProcessCollector(of_all)
meter.count(Metric("semel_visits_total", "Visits."), amount=2)
Counter("vllm:steps", "Steps.", ["engine"]).labels("0").inc(3)
meter.export({registry}, prefix="vllm:")
print(asyncio.run(meter.scrape()).decode())
"""


@pytest.mark.parametrize(("registry", "steps"), [("REGISTRY", (3, 3)), ("of_all", (3, 6))])
def test_with_a_folder_for_several_processes_each_tells_its_own_numbers_once(
    tmp_path: Path, registry: str, steps: tuple[int, int]
) -> None:
    """Two workers that share PROMETHEUS_MULTIPROC_DIR. Control: telling the sum counts twice."""
    for expected in steps:
        text = subprocess.run(
            [sys.executable, "-c", SEVERAL_PROCESSES.format(registry=registry)],
            env={"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            check=True,
            text=True,
            timeout=60,
        ).stdout
        lines = [line for line in text.splitlines() if line and not line.startswith("#") and "_created" not in line]
        assert lines == ["semel_visits_total 2.0", f'vllm:steps_total{{engine="0"}} {expected:.1f}']
