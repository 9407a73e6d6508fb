"""What `semel top` shows."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from rich.console import Console

from semel.cli.top import Look, draw, overview
from semel.telemetry import Meter, metrics
from semel.telemetry.scrape import Scrape
from tests.commands import invoke


def scrape(meter: Meter) -> Scrape:
    return Scrape.parse(meter.render().decode())


def looks() -> tuple[Look, Look]:
    first, second = Meter(), Meter()
    for meter in (first, second):
        meter.count(metrics.REQUESTS, "/v1/chat/completions", "200", amount=5)
        meter.set(metrics.WORKER_CONNECTED, 1, "w1")
        meter.set(metrics.WORKER_CONNECTED, 0, "w2")
    before = Look(10.0, {"a": scrape(first), "b": scrape(second), "c": "does not answer"})
    first.count(metrics.REQUESTS, "/v1/chat/completions", "200", amount=20)
    second.count(metrics.REQUESTS, "/v1/chat/completions", "503", amount=4)
    for tier, hits in (("processor", 3), ("worker", 4)):
        first.count(metrics.MM_CACHE_QUERIES, "m", "image", tier, amount=4)
        first.count(metrics.MM_CACHE_HITS, "m", "image", tier, amount=hits)
    first.count(metrics.FEATURE_BYTES_SAVED, amount=4e9)
    first.set(metrics.WORKER_RUNNING, 7, "w1")
    second.set(metrics.WORKER_RUNNING, 6, "w1")
    for _ in range(10):
        first.observe(metrics.STAGE_SECONDS, 0.004, "render")
    return before, Look(12.0, {"a": scrape(first), "b": scrape(second), "c": "does not answer"})


def test_rates_are_of_the_time_between_two_looks_over_all_processes() -> None:
    seen = overview(*looks())
    assert (seen.requests_per_s, seen.errors_per_s) == (12.0, 2.0)
    assert seen.hit_rates == {"processor": 0.75, "worker": 1.0}
    assert seen.saved_bytes_per_s == 2e9
    assert seen.workers == {"w1": 7.0, "w2": None}
    assert seen.missing == {"c": "does not answer"}
    median, high = seen.stages_s["render"]
    assert 0.0025 <= median <= high <= 0.005


def test_a_process_that_was_not_there_before_counts_from_the_next_look_on() -> None:
    before, after = looks()
    seen = overview(Look(before.at_s, {}), after)
    assert seen.requests_per_s == 0
    assert seen.hit_rates == {"processor": None, "worker": None}


def test_a_process_that_was_started_again_gives_no_negative_rate() -> None:
    before, after = looks()
    assert overview(Look(0.0, after.scrapes), Look(1.0, before.scrapes)).requests_per_s == 0


def test_the_page_has_every_figure() -> None:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(draw(overview(*looks()), 2.0))
    page = console.export_text()
    for words in ("12.0/s", "75%", "2.0 GB/s", "w1", "lost", "render", "c/metrics does not answer"):
        assert words in page


def test_host_memory_for_encoder_outputs_is_shown_where_a_worker_has_some() -> None:
    meter = Meter()
    meter.set(metrics.EMBEDDING_CAPACITY, 4e9, "0")
    before = Look(10.0, {"worker": scrape(meter)})
    meter.set(metrics.EMBEDDING_BYTES, 1e9, "0")
    meter.count(metrics.EMBEDDING_LOADS, "0", "host", amount=6)
    seen = overview(before, Look(12.0, {"worker": scrape(meter)}))
    assert (seen.tier_bytes, seen.tier_capacity_bytes, seen.tier_loads_per_s) == (1e9, 4e9, 3.0)
    for page, is_shown in ((seen, True), (overview(*looks()), False)):
        console = Console(record=True, width=130, file=io.StringIO())
        console.print(draw(page, 2.0))
        assert ("1.0 GB of 4.0 GB" in console.export_text()) == is_shown


@contextmanager
def answering(status: int) -> Iterator[str]:
    """A server with a page of metrics that answers everything with this status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(Meter().render())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "says"), [(401, "answers 401: with API keys, give the address of its --metrics-port"), (404, "404")]
)
def test_a_status_is_shown_and_without_any_metrics_no_page_is_drawn(tmp_path: Path, status: int, says: str) -> None:
    page = tmp_path / "page.svg"
    with answering(status) as url, answering(200) as other:
        shown = invoke("top", url, "--svg", str(page), "--every-s", "0.2")
        assert (shown.exit_code, page.exists()) == (1, False)
        assert says in " ".join(shown.output.split())
        assert invoke("top", url, other, "--svg", str(page), "--every-s", "0.2").exit_code == 0
        assert str(status) in page.read_text()
