"""What an operator asks of one of two workers, and what is left of it when one is killed."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import psutil
import pytest

from semel.lab.bench.ports import free_port
from semel.settings.secrets import create_key
from tests.conftest import Folder
from tests.engine.adapter_files import build_adapter
from tests.engine.parity import draw_image
from tests.serve.served import Served, image_url, serving, until

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(900)]

WORKERS: Final = 2
WAITING: Final = 64
HANG_S: Final = 3
PAUSE_S: Final = 40.0
"""Longer than the 30 s for which a request waits for an engine that no other suspect is at."""

START_S: Final = 180.0


@dataclass
class Two:
    """A server with two workers."""

    served: Served
    admin: list[httpx.Client]
    adapters: Path

    def post(self, worker: int, path: str, body: Any = None) -> None:
        response = self.admin[worker].post(path, json=body, timeout=60)
        assert response.status_code == 200, response.text

    def loads(self, name: str) -> int:
        """How often a worker has loaded an adapter."""
        return len(re.findall(rf"loaded the adapter '{name}'", self.served.log.read_text()))

    def kill(self, worker: int) -> None:
        """End a worker as the kernel does when memory runs out."""
        name = f"worker-{worker + 1}.sock"
        children = psutil.Process(self.served.process.pid).children()
        (found,) = [one for one in children if "worker" in (words := one.cmdline()) and name in str(words)]
        found.send_signal(signal.SIGKILL)

    def connected(self) -> int:
        return int(self.served.metric("semel_worker_connected"))


@pytest.fixture(scope="module")
def two(tiny: Folder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    model, home = tiny("qwen2-vl"), tmp_path_factory.mktemp("t")  # the paths of sockets have to be short
    key = home / "admin.key"
    create_key(key)
    port = free_port(WORKERS)
    flags = ("--workers", str(WORKERS), "--admin-port", str(port), "--admin-key-file", str(key))
    lora = ("--enable-lora", "--max-loras", "4", "--max-lora-rank", "8", "--engine-progress-s", str(HANG_S))
    bearer = {"Authorization": f"Bearer {key.read_text().strip()}"}
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        with serving(model, home, *flags, *lora, "--max-num-seqs", str(WAITING)) as served:
            urls = [f"http://127.0.0.1:{port + number}" for number in range(WORKERS)]
            for number, name in enumerate(("law", "bio")):
                build_adapter(model, home / name, number)
            clients = [stack.enter_context(httpx.Client(base_url=url, headers=bearer)) for url in urls]
            made = Two(served, clients, home)
            until(lambda: made.connected() == WORKERS, START_S)  # ready is a server with one of them
            yield made


def load(two: Two, worker: int, name: str) -> None:
    two.post(worker, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(two.adapters / name)})


def test_an_adapter_that_one_worker_loads_is_at_the_other_and_again_after_a_kill(two: Two) -> None:
    load(two, 0, "law")
    until(lambda: two.loads("law") == WORKERS, 30)
    plain = two.served.chat("hello").json()["choices"][0]["message"]["content"]
    expected = two.served.chat("hello", model="law").json()["choices"][0]["message"]["content"]
    assert plain != expected
    for worker in range(WORKERS):
        two.kill(worker)
        if worker == 0:  # the other one is asked while it is dead
            load(two, 1, "bio")
        loads = {name: two.loads(name) for name in ("law", "bio")}
        while two.loads("law") == loads["law"]:
            response = two.served.chat("hello", model="law")
            assert response.status_code == 200, response.text
            assert response.json()["choices"][0]["message"]["content"] == expected
        until(lambda: two.connected() == WORKERS, START_S)
        until(lambda: two.loads("bio") > loads["bio"], 30)  # noqa: B023
    two.post(1, "/v1/unload_lora_adapter", {"lora_name": "bio"})
    until(lambda: two.served.chat("hello", model="bio").status_code == 404, 30)


def test_requests_that_wait_in_a_pause_are_answered_when_their_worker_is_killed_S22(two: Two) -> None:
    """The other worker gets them, which is paused as well for a while: nobody's patience runs out."""
    rng = np.random.default_rng(3)
    image = image_url(draw_image(rng))
    for worker in range(WORKERS):
        two.post(worker, "/pause?mode=keep")
    with ThreadPoolExecutor(WAITING) as threads:
        asking = [
            threads.submit(two.served.chat, [image, {"type": "text", "text": f"what is {number}?"}], within_s=300)
            for number in range(WAITING)
        ]
        until(lambda: two.served.running() >= WAITING, 60)
        two.kill(0)
        time.sleep(PAUSE_S)
        two.post(1, "/resume")
        responses = [one.result(300) for one in asking]
    assert {response.status_code for response in responses} == {200}, [
        response.text for response in responses if response.status_code != 200
    ]
