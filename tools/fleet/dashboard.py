"""The dashboard, drawn from a real run: `python -m tools.fleet.dashboard docs/dashboard.png`.

A fleet of two workers and three frontends under load, one worker of which is killed; a real Prometheus
(Debian: `apt install prometheus`) that reads their metrics; and the dashboard's own queries, asked of it.
Grafana's part is to draw the answers, and is done here with matplotlib. Exit code 1 if a query has no answer.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.figure
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, PercentFormatter, StrMethodFormatter

from semel.lab.prove.processes import Fleet, running_fleet
from semel.lab.testing.models import build
from tests.telemetry.prometheus import Prometheus, running_prometheus
from tools.dashboard import PANELS, Panel
from tools.fleet.driving import Driver, Tally, ask_alone
from tools.fleet.plan import Load, draw_images, plan

RATE_INTERVAL = "10s"
STEP_S = 1.0
COLUMNS = 3
MAX_NAME = 28
GROUND, INK, GRID = "#181b1f", "#ccccdc", "#2c3235"
COLOURS = ("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff", "#c8f2c2")
FORMATS = {
    "percentunit": PercentFormatter(1.0, decimals=0),
    "Bps": EngFormatter("B/s"),
    "bytes": EngFormatter("B"),
    "s": EngFormatter("s"),
    "short": StrMethodFormatter("{x:,g}"),
}


@dataclass(frozen=True)
class Line:
    """The answer to a query: one series."""

    name: str
    seconds: list[float]
    values: list[float]


def lines_of(prometheus: Prometheus, legend: str, query: str, began: float, ended: float) -> list[Line]:
    """Return the series that a panel's query gives, named as Grafana names them."""
    expression = query.replace("$__rate_interval", RATE_INTERVAL)
    reply = prometheus.get("query_range", query=expression, start=str(began), end=str(ended), step=str(STEP_S))
    return [_line(legend, series, began) for series in reply["result"]]


def _line(legend: str, series: Mapping[str, Any], began: float) -> Line:
    name = re.sub(r"{{(\w+)}}", lambda label: series["metric"].get(label[1], ""), legend)
    found = {round(float(at) - began): float(value) for at, value in series["values"]}
    seconds = range(min(found), max(found) + 1)  # what is missing in between is a gap
    return Line(name, [float(at) for at in seconds], [found.get(at, math.nan) for at in seconds])


async def drive(fleet: Fleet, requests: int) -> tuple[Tally, float]:
    """Run a load in whose midst a worker is killed; return its tally, and when it began."""
    load = Load(requests)
    images = draw_images(load.images)
    reference = await ask_alone(fleet.urls, load.chats(), images)
    began = time.time()
    driver = Driver(fleet.urls, images, reference, at_a_time=load.at_a_time)
    running = asyncio.create_task(driver.run(plan(load, len(fleet.urls)), progress=True))
    await asyncio.sleep(40)
    await asyncio.to_thread(fleet.workers[-1].kill)
    return await running, began


def draw(prometheus: Prometheus, began: float, ended: float, file: Path) -> list[str]:
    """Draw every panel where the dashboard has it; the titles of those without an answer."""
    rows = -(-len(PANELS) // COLUMNS)
    canvas = matplotlib.figure.Figure(figsize=(19, 2.9 * rows), layout="constrained", facecolor="#111217")
    empty = []
    for number, panel in enumerate(PANELS):
        axes = canvas.add_subplot(rows, COLUMNS, number + 1)
        lines = [
            line
            for legend, query in panel.queries.items()
            for line in lines_of(prometheus, legend, query, began, ended)
        ]
        _draw_panel(axes, panel, lines)
        if not lines:
            empty.append(panel.title)
    canvas.savefig(file, dpi=100)
    return empty


def addresses(fleet: Fleet) -> list[str]:
    return [node.url.removeprefix("http://") for node in fleet.running]


def _draw_panel(axes: Axes, panel: Panel, lines: list[Line]) -> None:
    axes.set_facecolor(GROUND)
    axes.set_title(panel.title, color=INK, loc="left", fontsize=10, fontweight="bold")
    axes.grid(color=GRID)
    axes.tick_params(colors=INK, labelsize=8)
    axes.yaxis.set_major_formatter(FORMATS[panel.unit])
    axes.xaxis.set_major_formatter(EngFormatter("s"))
    for spine in axes.spines.values():
        spine.set_color(GRID)
    for index, line in enumerate(lines):
        axes.plot(
            line.seconds, line.values, label=line.name[-MAX_NAME:], color=COLOURS[index % len(COLOURS)], linewidth=1.2
        )
    if lines:
        axes.legend(
            fontsize=7, labelcolor=INK, facecolor=GROUND, edgecolor=GRID, loc="upper left", bbox_to_anchor=(1.01, 1)
        )


def main(words: list[str] | None = None) -> int:
    """Run the fleet, draw what its dashboard shows."""
    parser = argparse.ArgumentParser("tools.fleet.dashboard", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--requests", type=int, default=8_000)
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="semel-model-") as folder:
        model = build("qwen2-vl", Path(folder) / "qwen2-vl")
        with running_fleet(model) as fleet, running_prometheus(addresses(fleet), Path(folder)) as prometheus:
            tally, began = asyncio.run(drive(fleet, options.requests))
            time.sleep(5)
            empty = draw(prometheus, began, time.time(), options.file)
    sys.stdout.write(f"{tally.good} good, {len(tally.failures)} failed; panels without lines: {empty or 'none'}\n")
    return int(bool(empty))


if __name__ == "__main__":
    sys.exit(main())
