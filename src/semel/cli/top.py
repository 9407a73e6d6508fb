"""`semel top`: what a fleet is doing, in a terminal, from the metrics of its frontends and workers.

What is shown is a function of two looks at each process (`overview`); the rest is a loop that looks and draws.
"""

from __future__ import annotations

import io
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Final, get_args

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from semel.cli.error_line import print_error
from semel.telemetry import metrics
from semel.telemetry.meter import Metric
from semel.telemetry.scrape import Scrape, quantile
from semel.telemetry.stages import Stage

__all__ = ["Look", "Overview", "draw", "overview", "save", "scrape", "watch"]

_TIMEOUT_S: Final = 2.0
_PAGE_CHARS: Final = 130
_TIERS: Final = ("processor", "worker")
_STAGES: Final = get_args(Stage)


@dataclass(frozen=True, slots=True)
class Look:
    """All processes at one moment, by their URLs; those without a page of metrics have the reason in its place."""

    at_s: float
    scrapes: Mapping[str, Scrape | str]


@dataclass(frozen=True, slots=True)
class Overview:
    """The figures of the time between two looks."""

    missing: Mapping[str, str]
    """The reasons for missing metrics, by URL."""

    requests_per_s: float
    errors_per_s: float
    processed_per_s: float
    hit_rates: Mapping[str, float | None]
    """By tier; None if nothing was looked up."""

    saved_bytes_per_s: float
    sent_bytes_per_s: float
    cache_bytes: float
    cache_capacity_bytes: float
    tier_bytes: float = 0.0
    tier_capacity_bytes: float = 0.0
    """Of the workers' host memory for encoder outputs; 0 without one."""

    tier_loads_per_s: float = 0.0
    workers: Mapping[str, float | None] = field(default_factory=dict)
    """Requests that each is answering; None for one that no frontend is connected to."""

    stages_s: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Median and 95th percentile of those stages that requests passed."""


def overview(before: Look, after: Look) -> Overview:
    """Compare two looks. A process that was there at one of them only counts from the next on."""
    pairs = [
        (old, new)
        for url, new in after.scrapes.items()
        if isinstance(new, Scrape) and isinstance(old := before.scrapes.get(url), Scrape)
    ]
    elapsed_s = max(after.at_s - before.at_s, 1e-9)

    def rate(metric: Metric, **labels: str) -> float:
        grown = (new.total(metric, **labels) - old.total(metric, **labels) for old, new in pairs)
        return sum(max(0.0, one) for one in grown) / elapsed_s

    def hit_rate(tier: str) -> float | None:
        queries = rate(metrics.MM_CACHE_QUERIES, tier=tier)
        return rate(metrics.MM_CACHE_HITS, tier=tier) / queries if queries else None

    statuses = {status for _, new in pairs for status in new.values(metrics.REQUESTS, "status")}
    frontends = [new for _, new in pairs]
    return Overview(
        missing={url: why for url, why in after.scrapes.items() if isinstance(why, str)},
        requests_per_s=rate(metrics.REQUESTS),
        errors_per_s=sum(rate(metrics.REQUESTS, status=status) for status in statuses if status >= "400"),
        processed_per_s=rate(metrics.POOL_PROCESSED),
        hit_rates={tier: hit_rate(tier) for tier in _TIERS},
        saved_bytes_per_s=rate(metrics.FEATURE_BYTES_SAVED),
        sent_bytes_per_s=rate(metrics.FEATURE_BYTES_SENT),
        cache_bytes=sum(scrape.total(metrics.MM_CACHE_BYTES, tier="processor") for scrape in frontends),
        cache_capacity_bytes=sum(scrape.total(metrics.MM_CACHE_CAPACITY, tier="processor") for scrape in frontends),
        tier_bytes=sum(scrape.total(metrics.EMBEDDING_BYTES) for scrape in frontends),
        tier_capacity_bytes=sum(scrape.total(metrics.EMBEDDING_CAPACITY) for scrape in frontends),
        tier_loads_per_s=rate(metrics.EMBEDDING_LOADS),
        workers=_workers(frontends),
        stages_s=dict(_stages(pairs)),
    )


def _workers(frontends: Sequence[Scrape]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for scrape in frontends:
        running = scrape.values(metrics.WORKER_RUNNING, "worker")
        for name, connected in scrape.values(metrics.WORKER_CONNECTED, "worker").items():
            load = running.get(name, 0.0) if connected else None
            found[name] = max((one for one in (found.get(name), load) if one is not None), default=None)
    return dict(sorted(found.items()))


def _stages(pairs: Sequence[tuple[Scrape, Scrape]]) -> list[tuple[str, tuple[float, float]]]:
    rows = []
    for stage in _STAGES:
        before: dict[float, float] = {}
        after: dict[float, float] = {}
        for old, new in pairs:
            for sums, one in ((before, old), (after, new)):
                for bound, count in one.buckets(metrics.STAGE_SECONDS, stage=stage).items():
                    sums[bound] = sums.get(bound, 0.0) + count
        median, high = quantile(0.5, before, after), quantile(0.95, before, after)
        if median is not None and high is not None:
            rows.append((stage, (median, high)))
    return rows


def watch(urls: Sequence[str], *, every_s: float, console: Console) -> None:
    """Look and draw until Ctrl-C."""
    with ThreadPoolExecutor(max(1, len(urls))) as threads, Live(console=console, screen=console.is_terminal) as live:
        before = _look(urls, threads)
        live.update(Text(f"looking at {', '.join(urls)}; the first figures come in {every_s:g} s"))
        while True:
            time.sleep(every_s)
            after = _look(urls, threads)
            live.update(draw(overview(before, after), every_s), refresh=True)
            before = after


def save(urls: Sequence[str], path: Path, *, every_s: float) -> None:
    """Look twice, and draw one page to a file. If no process has metrics, say why and exit with 1."""
    console = Console(record=True, width=_PAGE_CHARS, file=io.StringIO())
    with ThreadPoolExecutor(max(1, len(urls))) as threads:
        before = _look(urls, threads)
        time.sleep(every_s)
        seen = overview(before, _look(urls, threads))
    if len(seen.missing) == len(set(urls)):
        print_error("\n".join(f"{url}/metrics {why}" for url, why in seen.missing.items()))
        raise SystemExit(1)
    console.print(draw(seen, every_s))
    path.write_text(console.export_svg(title="semel top"))


def _look(urls: Sequence[str], threads: ThreadPoolExecutor) -> Look:
    scrapes = dict(zip(urls, threads.map(scrape, urls), strict=True))
    return Look(time.monotonic(), scrapes)


def scrape(url: str) -> Scrape | str:
    """Return the metrics of a process, or why there are none."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/metrics", timeout=_TIMEOUT_S) as reply:  # noqa: S310
            return Scrape.parse(reply.read().decode())
    except urllib.error.HTTPError as error:
        error.close()
        remedy = ": with API keys, give the address of its --metrics-port"
        return f"answers {error.code}{remedy if error.code == HTTPStatus.UNAUTHORIZED else ''}"
    except OSError as error:
        return f"does not answer: {getattr(error, 'reason', error)}"
    except ValueError:
        return "has no metrics"


def draw(seen: Overview, every_s: float) -> RenderableType:
    """Draw an overview as a page."""
    page = Table.grid(padding=(0, 4))
    page.add_row(_traffic(seen), _stage_table(seen), _worker_table(seen))
    head = Text(f"semel top: the last {every_s:g} s   (Ctrl-C ends it)", style="bold")
    lost = [Text(f"{url}/metrics {why}", style="red") for url, why in seen.missing.items()]
    return Group(head, Text(), page, *lost)


def _traffic(seen: Overview) -> Table:
    table = Table("once", "", title="traffic", title_justify="left", show_header=False)
    table.add_row("requests", f"{seen.requests_per_s:,.1f}/s")
    table.add_row("errors", f"{seen.errors_per_s:,.1f}/s", style="red" if seen.errors_per_s else "")
    table.add_row("preprocessed", f"{seen.processed_per_s:,.1f} items/s")
    for tier, share in seen.hit_rates.items():
        table.add_row(f"hits, {tier}", "–" if share is None else f"{_bar(share)} {share:.0%}")
    table.add_row("bytes saved", f"{_bytes(seen.saved_bytes_per_s)}/s", style="green" if seen.saved_bytes_per_s else "")
    table.add_row("bytes sent", f"{_bytes(seen.sent_bytes_per_s)}/s")
    table.add_row("feature cache", f"{_bytes(seen.cache_bytes)} of {_bytes(seen.cache_capacity_bytes)}")
    if seen.tier_capacity_bytes:
        table.add_row("embedding tier", f"{_bytes(seen.tier_bytes)} of {_bytes(seen.tier_capacity_bytes)}")
        table.add_row("loaded, not encoded", f"{seen.tier_loads_per_s:,.1f} items/s")
    return table


def _stage_table(seen: Overview) -> Table:
    table = Table("stage", "median", "95%", title="latency", title_justify="left")
    for stage, (median, high) in seen.stages_s.items():
        table.add_row(stage, f"{median * 1e3:,.1f} ms", f"{high * 1e3:,.1f} ms")
    return table


def _worker_table(seen: Overview) -> Table:
    table = Table("worker", "running", title="workers", title_justify="left")
    for name, running in seen.workers.items():
        table.add_row(name, "lost" if running is None else f"{running:,.0f}", style="red" if running is None else "")
    return table


def _bar(share: float, width: int = 10) -> str:
    full = round(share * width)
    return "█" * full + "░" * (width - full)


def _bytes(number: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if number < 1000:
            return f"{number:,.0f} {unit}" if unit == "B" else f"{number:,.1f} {unit}"
        number /= 1000
    return f"{number:,.1f} TB"
