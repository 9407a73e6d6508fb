"""`semel serve --workers 2`: two real engines behind one frontend, each with cores of its own; and how fast it ends."""

from __future__ import annotations

import signal
import sys
import time

import httpx
import numpy as np
import psutil
import pytest

from semel.engine.vllm.compat.internals import CORE_BINDING
from semel.lab.bench.ports import free_port
from tests.conftest import Folder
from tests.engine.parity import draw_image
from tests.serve.served import Served, image_url, serving, sum_of, until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly, pytest.mark.alone, pytest.mark.timeout(900)]

START_S = 600
IDLE_S = 3.0


def workers_of(served: Served) -> list[psutil.Process]:
    return [child for child in psutil.Process(served.process.pid).children() if "worker" in child.cmdline()]


def answered_by(ports: list[int]) -> list[float]:
    """How many requests each worker has answered, as its own metrics say."""
    pages = [httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5).text for port in ports]
    return [sum_of(page, "vllm:request_success_total") for page in pages]


def test_two_workers_share_the_machine_and_the_requests(tiny: Folder, tmp_path_factory: pytest.TempPathFactory) -> None:
    port = free_port()
    flags = (
        "--workers",
        "2",
        "--preprocessing-processes",
        "1",
        "--kv-cache-memory-bytes",
        "512M",
        "--admin-port",
        str(port),
    )
    with serving(tiny("qwen2-vl"), tmp_path_factory.mktemp("two"), *flags, within_s=START_S) as served:
        workers = workers_of(served)
        cores = [worker.environ()[CORE_BINDING] for worker in workers]
        assert len(workers) == 2
        assert "nobind" in cores or not set(cores[0].split(",")) & set(cores[1].split(","))
        until(lambda: served.metric("semel_worker_connected") == 2, START_S)
        before = answered_by([port, port + 1])
        for number in range(24):
            content = [image_url(draw_image(np.random.default_rng(number))), {"type": "text", "text": "What?"}]
            assert served.chat(content).status_code == 200
        after = answered_by([port, port + 1])
        counts = [int(late - early) for early, late in zip(before, after, strict=True)]
        assert sum(counts) == 24
        assert min(counts) > 0, "one worker got nothing"
        began = time.monotonic()
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(60) == 0
        took_s = time.monotonic() - began
        sys.stdout.write(f"{counts} requests by worker; it ended within {took_s:.2f} s\n")
        assert took_s < IDLE_S, f"{took_s:.1f} s"
        assert not [worker for worker in workers if worker.is_running()]
