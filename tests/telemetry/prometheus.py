"""A real Prometheus, for tests: `prometheus` and `promtool`, which scripts/install unpacks from Debian's package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from semel.lab.bench.ports import free_port
from tests.serve.served import until

INSTALLED = Path(sys.prefix) / "opt" / "prometheus"
ALERTS = Path(__file__).parents[2] / "docs/prometheus/alerts.yaml"
START_S = 60.0
RULES_COUNT = ALERTS.read_text().count("- alert: ")


def find(name: str) -> str:
    """The program's path. Without one a test is skipped, but for CI, where it fails."""
    path = shutil.which(name, path=f"{INSTALLED}{os.pathsep}{os.environ.get('PATH', '')}")
    if path is None and os.environ.get("CI"):
        pytest.fail(f"there is no {name}: scripts/install unpacks it from Debian's package `prometheus`")
    return path or pytest.skip(f"there is no {name}: `apt install prometheus`, or scripts/install on Debian")


@dataclass(frozen=True)
class Prometheus:
    """A server that is running."""

    url: str

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer; a refusal is a failure."""
        reply = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=60, verify=False).json()
        assert reply["status"] == "success", reply
        return reply["data"]

    def query(self, expression: str) -> list[Any]:
        found: list[Any] = self.get("query", query=expression)["result"]
        return found

    def is_up(self) -> bool:
        try:
            return httpx.get(f"{self.url}/-/ready", timeout=5, verify=False).status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def running_prometheus(targets: Sequence[str], home: Path, *, rules: Path | None = ALERTS) -> Iterator[Prometheus]:
    """A Prometheus that asks these addresses every second, and evaluates the rules as often."""
    address = f"127.0.0.1:{free_port()}"
    prometheus = Prometheus(f"http://{address}")
    scrape = {"job_name": "semel", "static_configs": [{"targets": list(targets)}]}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "scrape_configs": [scrape],
        "rule_files": [] if rules is None else [str(rules)],
    }
    (home / "prometheus.yml").write_text(json.dumps(config))
    command = [find("prometheus"), f"--config.file={home}/prometheus.yml", f"--storage.tsdb.path={home}/data"]
    with (home / "prometheus.log").open("wb") as log:
        server = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        until(prometheus.is_up, START_S)
        yield prometheus
    finally:
        server.terminate()
        server.wait(30)
