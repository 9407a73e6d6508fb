"""A real Prometheus beside a frontend and a worker with API keys: it scrapes both, evaluates the alert rules, and
answers every query of the dashboard (issue 20.4). The worker's engine has no model; `python -m tools.fleet.dashboard`
asks the same of real engines.
"""

from __future__ import annotations

import base64
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from semel.lab.bench.ports import free_port
from semel.media.decode.warmup_media import image_file
from semel.settings.secrets import create_key
from tests.processing.test_hf import Folder
from tests.serve.served import SEMEL, until
from tests.telemetry.prometheus import RULES_COUNT, Prometheus, find, running_prometheus
from tests.waiting import end
from tools.dashboard import PANELS

KEY = "sk-a-key-of-a-tenant"
START_S = 300.0
EMPTY = {
    "Workers not used: refused, {{reason}}": "no worker differs",
    "Encoder cache hit rate: {{instance}}": "this engine has no encoder",
    "Evictions per minute: encoder outputs": "this engine has no encoder",
    "Repairs per minute: failovers": "no request went to another worker",
}
"""Queries that have no answer here, and why."""


@dataclass(frozen=True)
class Watched:
    """A frontend with API keys and its worker, and where each shows its metrics."""

    url: str
    frontend: str
    worker: str

    def chat(self, number: int) -> int:
        data = base64.b64encode(image_file(64, 48, number).data).decode()
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        content = [image, {"type": "text", "text": "hello"}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 3}
        headers = {"Authorization": f"Bearer {KEY}"}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=60).status_code

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"http://{self.frontend}/ready", timeout=10).status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def watched(model: Path, home: Path) -> Iterator[Watched]:
    create_key(home / "key")
    (home / "api-keys").write_text(f"alice {KEY}\n")
    (home / "api-keys").chmod(0o600)
    port, metrics, admin = free_port(), free_port(), free_port()
    address, gone = f"ipc://{home}/w.sock", f"ipc://{home}/gone.sock"
    common = ("--fleet-key-file", home / "key")
    commands = {
        "worker": ("testing", "worker", model, "--listen", address, "--admin-port", admin, "--rate", 100, *common),
        "frontend": (
            *("frontend", model, "--worker", address, "--worker", gone, "--port", port, "--preprocessing-processes", 1),
            *("--metrics-port", metrics, "--api-keys-file", home / "api-keys", *common),
        ),
    }
    with ExitStack() as stack:
        for name, words in commands.items():
            with (home / f"{name}.log").open("wb") as log:
                command = [str(word) for word in (SEMEL, *words)]
                process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"TMPDIR": str(home)})
            stack.callback(end, process)
        yield Watched(f"http://127.0.0.1:{port}", f"127.0.0.1:{metrics}", f"127.0.0.1:{admin}")


def without_answer(prometheus: Prometheus) -> set[str]:
    """The queries of the dashboard that Prometheus has no answer to."""
    return {
        f"{panel.title}: {legend}"
        for panel in PANELS
        for legend, query in panel.queries.items()
        if not prometheus.query(query.replace("$__rate_interval", "1m"))
    }


STATES = {"SemelWorkerDisconnected": "pending", "SemelNoWorker": "inactive", "SemelProcessDown": "inactive"}
"""Of alerts: one of the two addresses has no worker."""


def values(prometheus: Prometheus, query: str) -> list[str]:
    """As of the last scrape: the answers since then are not in it yet."""
    return [sample["value"][1] for sample in prometheus.query(query)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_prometheus_scrapes_both_evaluates_the_rules_and_answers_every_query_of_the_dashboard(
    tiny: Folder, tmp_path: Path
) -> None:
    """Controls: without a key the main port shows no metrics, and a metric that is not there has no answer."""
    find("prometheus")
    with watched(tiny("qwen2-vl"), tmp_path) as fleet:
        until(fleet.is_ready, START_S)
        assert httpx.get(f"{fleet.url}/metrics", timeout=10).status_code == 401
        with running_prometheus([fleet.frontend, fleet.worker], tmp_path) as prometheus:
            until(lambda: len(prometheus.query("up == 1")) == 2, START_S)
            for number in range(6):
                assert fleet.chat(number % 3) == 200
                time.sleep(0.5)  # the scrapes are a second apart
            until(lambda: without_answer(prometheus) == EMPTY.keys(), 60)

            def states() -> dict[str, str]:
                rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
                return {rule["name"]: rule["state"] if rule["health"] == "ok" else rule["health"] for rule in rules}

            assert len(states()) == RULES_COUNT
            assert not {"unknown", "err"} & {*states().values()}, states()
            until(lambda: STATES.items() <= states().items(), 60)  # a process that answers a scrape late was down
            until(lambda: values(prometheus, "semel_generation_tokens_total") == ["18"], 10)
            assert not prometheus.query("semel_pool_waitin")
