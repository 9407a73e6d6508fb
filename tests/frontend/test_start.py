"""A real frontend process from its start to ready, at a worker without a model (E3)."""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from semel.cache import Borrower
from semel.compose import compose_pipeline
from semel.core import Key, Rendering, Target
from semel.lab.bench.ports import free_port
from semel.lab.testing.engine import EchoEngine
from semel.media.decode.warmup_media import sample_image
from semel.render import Tokenizer
from semel.settings.secrets import create_key
from semel.wire.zmq import WorkerListener, memory_path
from semel.worker.worker import Worker
from tests.frontend.rig import CONTRACT
from tests.processing.test_pool_text import without_file
from tests.serve.served import SEMEL, sum_of

Folder = Callable[[str], Path]
READY_S = 90.0
END_S = 15.0


def body(number: int) -> dict[str, Any]:
    """A chat with an image that no other number has."""
    url = "data:image/png;base64," + base64.b64encode(sample_image(number).data).decode()
    part = {"type": "image_url", "image_url": {"url": url}}
    return {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "hello"}]}]}


@dataclass(frozen=True)
class Started:
    """A frontend process that has reported ready."""

    client: httpx.AsyncClient
    log: Path
    pid: int

    async def metrics(self) -> str:
        return (await self.client.get("/metrics")).text

    async def render(self, number: int) -> Any:
        response = await self.client.post("/v1/chat/completions/render", json=body(number))
        return response.status_code, response.json()

    def warm_up_lines(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if "warm" in line]


@asynccontextmanager
async def started(folder: Path, home: Path, target: Target, *flags: str, images: int = 2) -> AsyncIterator[Started]:
    """`semel frontend` at a worker whose contract has this target and takes images, but no audio."""
    key = create_key(home / "key")
    fingerprint = compose_pipeline(folder, target, Key(bytes(32))).fingerprint
    contract = replace(CONTRACT, fingerprint=fingerprint, target=target, max_items={"image": images, "audio": 0})
    address = f"ipc://{home}/s/w.sock"
    path = memory_path(address)
    assert path is not None
    async with WorkerListener(address, key=key, contract=contract) as listener, Borrower(path) as borrowers:
        serving = asyncio.create_task(Worker(EchoEngine(contract), listener, borrowers).run())
        try:
            async with _process(folder, home, address, *flags) as made:
                yield made
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


@asynccontextmanager
async def _process(folder: Path, home: Path, address: str, *flags: str) -> AsyncIterator[Started]:
    port, log = free_port(), home / "frontend.log"
    process = _launch(folder, home, log, "--worker", address, "--port", str(port), *flags)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            async with asyncio.timeout(READY_S):
                while not await _is_ready(client):
                    assert process.poll() is None, log.read_text()[-3_000:]
                    await asyncio.sleep(0.05)
            yield Started(client, log, process.pid)
    finally:
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def _launch(folder: Path, home: Path, log: Path, *flags: str) -> subprocess.Popen[bytes]:
    command = [str(SEMEL), "frontend", str(folder), "--fleet-key-file", str(home / "key"), "--drain-delay-s=0", *flags]
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | {"TMPDIR": str(home)})


async def _is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/ready")).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
async def test_a_frontend_is_ready_after_both_paths_are_warm_and_shows_nothing_of_it_E3(
    tiny: Folder, tmp_path: Path
) -> None:
    target = Target("float32", "engine")
    async with started(tiny("qwen2-vl"), tmp_path, target, "--preprocessing-processes", "2") as frontend:
        metrics = await frontend.metrics()
        for name in ("mm_cache_queries_total", "mm_cache_items", "mm_cache_bytes", "mm_cache_evictions_total"):
            assert sum_of(metrics, f"semel_{name}") == 0, name
        for name in ("pool_decoded_total", "pool_processed_total", "pool_failed_total", "flights_joined_total"):
            assert sum_of(metrics, f"semel_{name}") == 0, name
        execute, inspect = frontend.warm_up_lines()
        assert "warmed up execute (text, image) in " in execute
        assert "warmed up inspect (text, image) in " in inspect
        status, rendered = await frontend.render(1)
        assert (status, len(rendered["features"]["mm_hashes"]["image"])) == (200, 1)
        assert sum_of(await frontend.metrics(), "semel_mm_cache_queries_total") == 0


@pytest.mark.slow
async def test_a_processor_that_raises_gives_a_warning_and_a_frontend_that_is_ready_E3(
    tiny: Folder, tmp_path: Path
) -> None:
    broken = Target("float32", "engine", {"size": {"longest_edge": 1, "shortest_edge": "broken"}})
    async with started(tiny("qwen2-vl"), tmp_path, broken, "--preprocessing-processes", "1") as frontend:
        lines = frontend.warm_up_lines()
        assert sum("with image failed: the model's processor refused the image" in line for line in lines) == 2
        assert sum("(text) in " in line for line in lines) == 2
        status, refused = await frontend.render(1)
        assert (status, refused["error"]["code"]) == (400, "invalid_media")
        answer = await frontend.client.post("/tokenize", json={"messages": [{"role": "user", "content": "hello"}]})
        assert answer.json()["count"] > 0


@pytest.mark.slow
async def test_a_frontend_runs_a_model_s_code_only_if_it_was_started_with_the_flag_too(
    tiny: Folder, tmp_path: Path
) -> None:
    target = Target("float32", "engine", rendering=Rendering(trust_remote_code=True))
    for name, flags in [("without", ()), ("with", ("--trust-remote-code",))]:
        home = tmp_path / name
        home.mkdir()
        try:
            async with started(tiny("qwen2-vl"), home, target, "--preprocessing-processes", "1", *flags):
                assert flags
        except AssertionError as error:
            assert not flags
            assert "start it with --trust-remote-code as well" in str(error)


@pytest.mark.slow
async def test_a_frontend_of_a_model_without_tokenizer_json_answers_as_one_with_it(
    tiny: Folder, tmp_path: Path
) -> None:
    target, source = Target("float32", "engine"), tiny("qwen2-vl")
    folder = without_file(source, tmp_path / "older")
    local, text = Tokenizer.load(source), "naïve 🙂 <|im_end|> 12"
    async with started(folder, tmp_path, target, "--preprocessing-processes", "1") as frontend:
        tokens = (await frontend.client.post("/tokenize", json={"prompt": text})).json()["tokens"]
        assert tokens == local.encode(text, add_special_tokens=True)
        shown = (await frontend.client.post("/detokenize", json={"tokens": tokens})).json()["prompt"]
        assert shown == local.decode(tokens)
        status, rendered = await frontend.render(1)
        assert status == 200
        assert local.token_id("<|image_pad|>") in rendered["token_ids"]
        chat = await frontend.client.post("/v1/chat/completions", json={**body(1), "logprobs": True})
        echo = await frontend.client.post("/v1/completions", json={"prompt": tokens, "echo": True, "max_tokens": 1})
        assert (chat.status_code, echo.status_code) == (200, 200), (chat.text, echo.text)
        assert echo.json()["choices"][0]["text"].startswith(shown)
        assert "tokenizer.json is missing" in frontend.log.read_text()
