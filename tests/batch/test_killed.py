"""`semel batch` as a user runs it, without a model: killed, continued, stopped, with a server of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from semel.lab.bench.batch import write_batch
from semel.lab.bench.serving.images import Images
from tests.conftest import Folder
from tests.serve.served import SEMEL, Served, until
from tests.serve.test_draining import rehearsing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LINES, IMAGES = 90, 12
WITHIN_S = 120.0
SEEDS = count()


@pytest.fixture(scope="module")
def model(tiny: Folder) -> Path:
    return tiny("qwen2-vl")


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with rehearsing(model, tmp_path_factory.mktemp("served"), rate=10) as served:
        yield served


@pytest.fixture
def batch_file(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    write_batch(path, Images(next(SEEDS)), LINES, IMAGES)
    return path


@contextmanager
def batch(path: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    command = [str(SEMEL), "batch", str(path), str(path.with_suffix(".out")), "--concurrency=8", *words]
    environment = os.environ | {"TMPDIR": str(path.parent)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def results(path: Path) -> list[Any]:
    output = path.with_suffix(".out")
    return [json.loads(line) for line in output.read_bytes().split(b"\n")[:-1]] if output.exists() else []


def has(count: int, path: Path) -> Callable[[], bool]:
    return lambda: len(results(path)) >= count


def test_a_client_that_is_killed_goes_on_and_each_image_is_preprocessed_once(served: Served, batch_file: Path) -> None:
    before = served.metric("semel_pool_processed_total")
    for kill in range(1, 4):
        with batch(batch_file, "--base-url", f"{served.url}/v1") as process:
            until(has(kill * 20, batch_file), WITHIN_S)
            process.send_signal(signal.SIGKILL)
        assert len(results(batch_file)) < LINES, "it was not killed on its way"
    with batch(batch_file, "--base-url", served.url) as process:
        _, errors = process.communicate(timeout=WITHIN_S)
    assert (process.returncode, f"{LINES} results" in errors) == (0, True), errors
    found = results(batch_file)
    assert Counter(one["custom_id"] for one in found) == {f"line-{number}": 1 for number in range(LINES)}
    assert {len(one["response"]["body"]["choices"][0]["message"]["content"].split()) for one in found} == {16}
    assert served.metric("semel_pool_processed_total") - before == IMAGES


def test_ctrl_c_ends_it_and_says_how_it_goes_on(served: Served, batch_file: Path) -> None:
    with batch(batch_file, "--base-url", served.url) as process:
        until(has(10, batch_file), WITHIN_S)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=WITHIN_S)
    assert (process.returncode, "the same command goes on" in errors) == (1, True), errors
    until(lambda: not served.running(), WITHIN_S)


OWN_SERVER = """
import sys
from pathlib import Path
from semel.batch.settings import BatchSettings
from semel.cli.batch import run
path, model = map(Path, sys.argv[1:])
settings = BatchSettings(path, path.with_suffix(".out"), str(model))
sys.exit(run(settings, ["--rate=20", "--preprocessing-processes=1"], serve=("testing", "serve")))
"""


@pytest.mark.parametrize("is_killed", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_server_of_its_own_ends_with_the_batch(model: Path, batch_file: Path, is_killed: bool) -> None:
    command = [sys.executable, "-c", OWN_SERVER, str(batch_file), str(model)]
    environment = os.environ | {"TMPDIR": str(batch_file.parent)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment) as process:
        try:
            until(lambda: has(1, batch_file)() or process.poll() is not None, WITHIN_S)
            family = psutil.Process(process.pid).children(recursive=True)
            if is_killed:
                process.kill()
            _, errors = process.communicate(timeout=WITHIN_S)
        finally:
            process.kill()
    assert len(family) > 2
    assert not psutil.wait_procs(family, 30)[1]
    if not is_killed:
        assert (process.returncode, len(results(batch_file))) == (0, LINES), errors
        assert not list(batch_file.parent.glob("semel_start-*")), "the log of a start that went well is removed"
