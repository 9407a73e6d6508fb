"""The loop of `rl_loop` through `semel serve`: groups over HTTP, and new weights in a running worker after each step.

A half of the images is asked about with `n` in one request, the other in as many requests at once. Some samples still
run when a step ends: the engine is paused, which aborts them, takes the weights of a folder, and goes on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import httpx
import numpy as np

from semel.lab.bench.ports import free_port
from semel.settings.secrets import create_key
from tests.engine.parity import draw_image
from tests.serve.served import Served, image_url, serving, sum_of, until

__all__ = ["ServedLoop", "faults_of_served", "served_loop"]

_TOKENS: Final = 8
_LONG: Final = 512
_LEFT: Final = 4
_SIDE: Final = 224
_AT_ONCE: Final = 32
_FLAGS: Final = ("--encoder-cache-embeddings", "8192", "--kv-cache-memory-bytes", "1G")


@dataclass
class ServedLoop:
    """The counts of a loop."""

    images: int
    steps: int
    decodes: int = 0
    preprocessings: int = 0
    encodes: int = 0
    samples: int = 0
    aborted: int = 0
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


def faults_of_served(loop: ServedLoop) -> list[str]:
    """Return what must not be: an image is decoded and preprocessed once, and encoded once after each update."""
    faults = [f"{len(loop.failures)} samples failed: {loop.failures[0]}"] if loop.failures else []
    for name, found, expected in (
        ("decodes", loop.decodes, loop.images),
        ("preprocessings", loop.preprocessings, loop.images),
        ("encodes", loop.encodes, loop.images * loop.steps),
    ):
        if found != expected:
            faults.append(f"{found} {name} instead of {expected}")
    return faults


class _Trainer:
    """The part of a framework that samples, and updates weights."""

    def __init__(self, served: Served, admin: httpx.Client, loop: ServedLoop, samples: int) -> None:
        self._served = served
        self._admin = admin
        self._loop = loop
        self._samples = samples

    def step(self, images: Sequence[dict[str, Any]], weights: Path, version: str) -> None:
        """Sample, and update the weights while a few samples still run."""
        asked = [
            (image, count)
            for number, image in enumerate(images)
            for count in ([self._samples] if number % 2 else [1] * self._samples)
        ]
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            list(threads.map(lambda one: self._sample(*one), asked))
            left = [threads.submit(self._sample, image, 1, _LONG) for image in images[:_LEFT]]
            until(lambda: self._served.running() >= len(left), 60)
            self._post("/pause")
            for one in left:
                one.result(60)
        self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}})
        self._post("/update_weight_version", {"new_version": version})
        self._post("/resume")

    def counts(self) -> np.ndarray[Any, Any]:
        """Decodes, preprocessings and encodes until now."""
        worker = self._admin.get("/metrics").text
        encoded = sum_of(worker, "semel_encoder_planned_total") - sum_of(worker, "semel_embedding_loads_total")
        decoded, processed = (self._served.metric(f"semel_pool_{what}_total") for what in ("decoded", "processed"))
        return np.array([decoded, processed, encoded])

    def _sample(self, image: dict[str, Any], count: int, tokens: int = _TOKENS) -> None:
        content = [image, {"type": "text", "text": "What is this?"}]
        fields = {"n": count, "max_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
        response = self._served.chat(content, **fields)
        if response.status_code != 200:
            self._loop.failures.append(response.text[:200])
            return
        reasons = {choice["finish_reason"] for choice in response.json()["choices"]}
        self._loop.samples += count
        self._loop.aborted += reasons == {"abort"}
        if reasons != {"length"} and not (tokens == _LONG and reasons == {"abort"}):
            self._loop.failures.append(f"finished as {reasons}")

    def _post(self, path: str, body: Any = None) -> None:
        self._admin.post(path, json=body, timeout=120).raise_for_status()


def served_loop(model: Path, scratch: Path, steps: int, samples: int, images: int) -> ServedLoop:
    """Start `semel serve` and run the loop."""
    loop = ServedLoop(images, steps)
    rng = np.random.default_rng(1)
    first, *others = [image_url(draw_image(rng, side=_SIDE)) for _ in range(images + 1)]
    with _serving(model, scratch) as (served, admin):
        _Trainer(served, admin, ServedLoop(1, 1), 1).step([first], model, "warm")
        trainer = _Trainer(served, admin, loop, samples)
        before, began = trainer.counts(), perf_counter()
        for step in range(steps):
            trainer.step(others, model, str(step))
        loop.seconds = perf_counter() - began
        loop.decodes, loop.preprocessings, loop.encodes = map(int, trainer.counts() - before)
    return loop


@contextmanager
def _serving(model: Path, scratch: Path) -> Iterator[tuple[Served, httpx.Client]]:
    key, port = scratch / "admin.key", free_port()
    create_key(key)
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    try:
        flags = (*_FLAGS, "--admin-port", str(port), "--admin-key-file", str(key))
        headers = {"Authorization": f"Bearer {key.read_text().strip()}"}
        with (
            serving(model, scratch, *flags, within_s=600) as served,
            httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as admin,
        ):
            yield served, admin
    finally:
        del os.environ["VLLM_SERVER_DEV_MODE"]
