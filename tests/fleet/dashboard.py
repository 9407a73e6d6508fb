"""The dashboard, drawn from a real run: `python -m tests.fleet.dashboard docs/dashboard.png`.

A fleet of two workers and three frontends under load, one worker of which is killed; a real Prometheus
(Debian: `apt install prometheus`) that reads their metrics; and the dashboard's own queries, asked of it.
Grafana's part is to draw the answers, and is done here with matplotlib. Exit code 1 if a query has no answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import matplotlib.figure
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, PercentFormatter

from semel.bench.ports import free_port
from semel.telemetry.dashboard import PANELS, Panel
from semel.testing.models import build
from tests.fleet.driving import Driver, Tally, ask_alone
from tests.fleet.plan import Load, pictures, plan
from tests.fleet.processes import Fleet, Node, running_fleet
from tests.serve.served import until

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
    "reqps": EngFormatter("/s"),
    "short": EngFormatter(),
}


@dataclass(frozen=True)
class Line:
    """What a query answered: one series."""

    name: str
    seconds: list[float]
    values: list[float]


@dataclass(frozen=True)
class Prometheus:
    """A server that is running."""

    url: str

    def lines(self, legend: str, query: str, began: float, ended: float) -> list[Line]:
        """The series that a panel's query gives, named as Grafana names them."""
        expression = query.replace("$__rate_interval", RATE_INTERVAL)
        asked = {"query": expression, "start": str(began), "end": str(ended), "step": str(STEP_S)}
        reply = httpx.get(f"{self.url}/api/v1/query_range", params=asked, timeout=60, verify=False).json()
        if reply["status"] != "success":
            raise SystemExit(f"Prometheus refused {query}: {reply['error']}")
        return [_line(legend, series, began) for series in reply["data"]["result"]]

    def is_up(self) -> bool:
        try:
            return httpx.get(f"{self.url}/-/ready", timeout=5, verify=False).status_code == 200
        except httpx.TransportError:
            return False


def _line(legend: str, series: Mapping[str, Any], began: float) -> Line:
    name = re.sub(r"{{(\w+)}}", lambda label: series["metric"].get(label[1], ""), legend)
    seconds, values = zip(*series["values"], strict=True)
    return Line(name, [float(at) - began for at in seconds], [float(value) for value in values])


@contextmanager
def running_prometheus(nodes: list[Node]) -> Iterator[Prometheus]:
    """A Prometheus that asks these processes every second."""
    if shutil.which("prometheus") is None:
        raise SystemExit("there is no prometheus here: `apt install prometheus`")
    with tempfile.TemporaryDirectory(prefix="semel-prometheus-") as folder:
        home, address = Path(folder), f"127.0.0.1:{free_port()}"
        prometheus = Prometheus(f"http://{address}")
        targets = [node.url.removeprefix("http://") for node in nodes]
        scrape = {"job_name": "semel", "static_configs": [{"targets": targets}]}
        config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}
        (home / "prometheus.yml").write_text(json.dumps(config))
        command = ["prometheus", f"--config.file={home}/prometheus.yml", f"--storage.tsdb.path={home}/data"]
        with (home / "log").open("wb") as log:
            server = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
        try:
            until(prometheus.is_up, 60)
            yield prometheus
        finally:
            server.terminate()
            server.wait(30)


async def drive(fleet: Fleet, requests: int) -> tuple[Tally, float]:
    """A load in whose midst a worker is killed; its tally, and when it began."""
    load = Load(requests)
    images = pictures(load.images)
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
    canvas = matplotlib.figure.Figure(figsize=(15, 2.9 * rows), layout="constrained", facecolor="#111217")
    empty = []
    for number, panel in enumerate(PANELS):
        axes = canvas.add_subplot(rows, COLUMNS, number + 1)
        lines = [
            line for legend, query in panel.queries.items() for line in prometheus.lines(legend, query, began, ended)
        ]
        _draw_panel(axes, panel, lines)
        if not lines:
            empty.append(panel.title)
    canvas.savefig(file, dpi=100)
    return empty


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
        legend = axes.legend(fontsize=7, labelcolor=INK, facecolor=GROUND, edgecolor=GRID, loc="upper left", ncols=2)
        legend.set_in_layout(False)


def main(words: list[str] | None = None) -> int:
    """Run the fleet, draw what its dashboard shows."""
    parser = argparse.ArgumentParser("tests.fleet.dashboard", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--requests", type=int, default=8_000)
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="semel-model-") as folder:
        model = build("qwen2-vl", Path(folder) / "qwen2-vl")
        with running_fleet(model) as fleet, running_prometheus(fleet.running) as prometheus:
            tally, began = asyncio.run(drive(fleet, options.requests))
            time.sleep(5)
            empty = draw(prometheus, began, time.time(), options.file)
    sys.stdout.write(f"{tally.good} good, {len(tally.failures)} failed; panels without lines: {empty or 'none'}\n")
    return int(bool(empty))


if __name__ == "__main__":
    sys.exit(main())
