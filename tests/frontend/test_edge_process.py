"""`semel frontend` as a process with 600 open files, TLS and API keys, seen from outside (S25)."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from semel.lab.bench.ports import free_port
from semel.settings.secrets import create_key
from tests.embeddings.certificates import Authority
from tests.security.test_s25_connections import FILES, IDLE, LIMIT, ask, connected
from tests.security.test_s25_keys import NEW, OLD, replace_file
from tests.serve.served import SEMEL, sum_of

WITHIN_S = 60.0

logger = logging.getLogger(__name__)


@dataclass
class Frontend:
    """A frontend whose worker never comes: it answers probes, and checks keys."""

    port: int
    metrics_port: int
    keys: Path
    authority: Authority
    tls: ssl.SSLContext
    log: Path

    async def status(self, client: httpx.AsyncClient, key: str) -> int:
        response = await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        return response.status_code

    async def metric(self, name: str, labels: str = "") -> float:
        async with httpx.AsyncClient(timeout=WITHIN_S) as client:
            text = (await client.get(f"http://127.0.0.1:{self.metrics_port}/metrics")).text
        return sum_of(text, name, labels)

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=f"https://localhost:{self.port}", verify=self.tls, timeout=WITHIN_S)


@asynccontextmanager
async def frontend(home: Path) -> AsyncIterator[Frontend]:
    authority, keys, log = Authority.create(home / "tls"), home / "keys", home / "log"
    create_key(home / "key")
    replace_file(keys, f"acme {OLD}\n")
    (home / "model").mkdir()
    (home / "model" / "config.json").write_text("{}")
    made = Frontend(free_port(), free_port(), keys, authority, authority.client_context(), log)
    command = [SEMEL, "frontend", home / "model", "--fleet-key-file", home / "key", "--worker", f"ipc://{home}/w.sock"]
    command += [
        f"--port={made.port}",
        f"--metrics-port={made.metrics_port}",
        f"--api-keys-file={keys}",
        "--skip-checks",
    ]
    command += [
        f"--ssl-certfile={authority.certificate}",
        f"--ssl-keyfile={authority.private_key}",
        "--preprocessing-processes=1",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: ASYNC220 it is not waited for
            list(map(str, command)),
            stdout=output,
            stderr=output,
            env=os.environ | {"TMPDIR": str(home)},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES)),
        )
    try:
        async with asyncio.timeout(WITHIN_S):
            while not (await ask(made.port, "/health", tls=made.tls)).startswith(b"HTTP/1.1 200 "):
                assert process.poll() is None, log.read_text()[-3_000:]
                await asyncio.sleep(0.1)
        yield made
    finally:
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, 20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


@pytest.mark.slow
async def test_a_frontend_under_idle_connections_answers_probes_and_takes_new_keys_S25(tmp_path: Path) -> None:
    async with frontend(tmp_path) as made, made.client() as client:
        assert [await made.status(client, OLD), await made.status(client, NEW)] == [503, 401]
        assert await made.metric("semel_connections_limit") == LIMIT
        async with connected(made.port, IDLE):
            for path in ("/health", "/ready"):
                began = time.monotonic()
                answer = await ask(made.port, path, tls=made.tls)
                assert answer.startswith(b"HTTP/1.1 200 " if path == "/health" else b"HTTP/1.1 503 ")
                logger.info("%s was answered in %.0f ms beside %d", path, 1_000 * (time.monotonic() - began), IDLE)
            assert (await ask(made.metrics_port, "/metrics")).startswith(b"HTTP/1.1 200 ")
            assert await made.metric("semel_connections_closed_total", 'reason="silent"') >= IDLE - LIMIT
            replace_file(made.keys, f"acme {NEW}\n")
            began = time.monotonic()
            async with asyncio.timeout(WITHIN_S):
                while await made.status(client, OLD) != 401:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            logger.info("the revoked key was refused after %.2f s", time.monotonic() - began)
            assert await made.status(client, NEW) == 503, "it is taken, and there is no worker"
        replace_file(made.keys, "")
        async with asyncio.timeout(WITHIN_S):
            while not await made.metric("semel_file_stale", 'file="api_keys"'):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert await made.status(client, NEW) == 503
        assert "api_keys: changed, and cannot be used" in made.log.read_text()
        assert await made.metric("semel_refusals_total", 'code="invalid_api_key"') >= 2
