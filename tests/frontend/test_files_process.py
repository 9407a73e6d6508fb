"""A real frontend process with a media store: the `openai` client, kill -9 and a restart, without any worker."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from semel.lab.bench.ports import free_port
from semel.settings import create_key
from tests.render.conftest import folder
from tests.serve.served import SEMEL

__all__ = ["folder"]

START_S = 120.0


@contextmanager
def frontend(model: Path, home: Path) -> Iterator[tuple[openai.OpenAI, subprocess.Popen[bytes]]]:
    """`semel frontend` with a media store; it has no worker, and files need none."""
    port = free_port()
    command = [str(SEMEL), "frontend", str(model), f"--fleet-key-file={home}/key", f"--worker=ipc://{home}/none.sock"]
    command += [f"--port={port}", "--preprocessing-processes=1", f"--media-store={home}/media", "--feature-cache=lru"]
    command += ["--drain-delay-s=0", "--skip-checks"]
    with (home / "log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}/v1"
            until_s = time.monotonic() + START_S
            while True:
                assert process.poll() is None, (home / "log").read_text()
                assert time.monotonic() < until_s, (home / "log").read_text()
                try:
                    if httpx.get(f"{url}/files", timeout=10).status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.1)
            with openai.OpenAI(api_key="none", base_url=url, max_retries=0) as client:
                yield client, process
        finally:
            process.kill()
            process.wait(timeout=30)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_was_uploaded_is_there_after_a_kill_and_a_restart(folder: Path, tmp_path: Path) -> None:
    create_key(tmp_path / "key")
    with frontend(folder, tmp_path) as (client, _):
        made = [client.files.create(file=(f"{one}.png", bytes([one]) * 300_000), purpose="vision") for one in range(3)]
        assert client.files.content(made[1].id).content == bytes([1]) * 300_000
    with frontend(folder, tmp_path) as (client, _):
        assert list(client.files.list(order="asc")) == sorted(made, key=lambda file: (file.created_at, file.id))
        assert client.files.content(made[2].id).content == bytes([2]) * 300_000
        assert client.files.delete(made[0].id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(made[0].id)
        metrics = httpx.get(str(client.base_url).replace("/v1/", "/metrics"), timeout=10).text
        assert "semel_media_store_files 2.0" in metrics
