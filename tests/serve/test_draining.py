"""SIGTERM under load: what was taken is answered, what comes is refused, and nothing is left. All in real processes.

The worker's engine has no model, so that the tests need half a minute instead of two; how processes end is the same.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from semel.lab.bench.ports import free_port
from semel.settings.secrets import create_key
from tests.conftest import Folder
from tests.serve.served import SEMEL, Served, image_url, sum_of, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

START_S = 240.0
STREAMS = 24
RENDERS = 6
RATE = 5
TOKENS = 40
DRAIN_S = "90"
HURRY_S = 20.0
CHAT = "/v1/chat/completions"


@contextmanager
def started(home: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command of semel; what is left of it at the end is killed."""
    with (home / f"{command[0]}.log").open("ab") as log:
        process = subprocess.Popen(
            [str(SEMEL), *command], stdout=log, stderr=log, env=os.environ | {"TMPDIR": str(home)}, process_group=0
        )
    family = [psutil.Process(process.pid)]
    try:
        yield process
    finally:
        if process.poll() is None:
            family += family[0].children(recursive=True)
            for one in family:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
        process.wait(10)


@contextmanager
def rehearsing(model: Path, home: Path, drain_s: str = DRAIN_S, rate: int = RATE) -> Iterator[Served]:
    """`semel testing serve`, ready."""
    port = free_port()
    flags = ("--port", str(port), "--rate", str(rate), "--drain-s", drain_s, "--preprocessing-processes", "1")
    with started(home, "testing", "serve", str(model), *flags) as process:
        served = Served(process, f"http://127.0.0.1:{port}", home, home / "testing.log", 0.0)
        until_ready(served)
        until(lambda: "semel is ready" in served.log.read_text(), 10)  # the command knows it a moment later than we do
        yield served


def until_ready(served: Served) -> None:
    until(lambda: served.ready()[0] or served.process.poll() is not None, START_S)
    assert served.process.poll() is None, served.log.read_text()[-3_000:]


def body_of(content: object = "Count.", **fields: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": TOKENS, **fields}


def picture(seed: int) -> dict[str, Any]:
    pixels = np.random.default_rng(seed).integers(0, 255, (448, 448, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return image_url(buffer.getvalue())


async def streamed(client: httpx.AsyncClient, begun: asyncio.Semaphore) -> list[int]:
    """The numbers of the words of one stream, which has to end as it should."""
    numbers, last = [], ""
    async with client.stream("POST", CHAT, json=body_of(stream=True)) as response:
        assert response.status_code == 200
        begun.release()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
                numbers += [int(delta["content"].partition("@")[0])] if delta["content"] else []
            last = line or last
    assert last == "data: [DONE]"
    return numbers


async def rendered(client: httpx.AsyncClient, seed: int) -> int:
    body = body_of([picture(seed), {"type": "text", "text": "?"}])
    return (await client.post(f"{CHAT}/render", json=body)).status_code


async def uploaded(port: int, begun: asyncio.Semaphore, go_on: asyncio.Event) -> bytes:
    """The first line of the answer to a request whose body stops half way until it may go on."""
    body = json.dumps(body_of(max_tokens=2)).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body[:20])
    await writer.drain()
    begun.release()
    await go_on.wait()
    writer.write(body[20:])
    line = await reader.readline()
    writer.close()
    return line


async def in_flight(client: httpx.AsyncClient, count: int) -> None:
    """Wait until there are so many requests in flight, or more."""
    async with asyncio.timeout(60):
        while sum_of((await client.get("/metrics")).text, "semel_requests_in_flight") < count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def client_of(served: Served) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=served.url, timeout=240, limits=httpx.Limits(max_connections=None))


def test_nothing_is_cut_off_when_serve_is_stopped_under_load(tiny: Folder, tmp_path: Path) -> None:
    with rehearsing(tiny("qwen2-vl"), tmp_path) as served:
        family = served.processes()
        folder = served.folder
        asyncio.run(asyncio.wait_for(_stop_under_load(served), 240))
        assert served.process.wait(60) == 0, served.log.read_text()[-3_000:]
        assert not [process for process in family if process.is_running() and process.status() != "zombie"]
        assert not folder.exists()


async def _stop_under_load(served: Served) -> None:
    port, begun, go_on = int(served.url.rpartition(":")[2]), asyncio.Semaphore(0), asyncio.Event()
    async with client_of(served) as client, asyncio.TaskGroup() as load:
        streams = [load.create_task(streamed(client, begun)) for _ in range(STREAMS)]
        upload = load.create_task(uploaded(port, begun, go_on))
        for _ in range(STREAMS + 1):
            await begun.acquire()
        renders = [load.create_task(rendered(client, seed)) for seed in range(RENDERS)]
        await in_flight(client, STREAMS + 2)
        served.process.terminate()
        await _refuses(served.url)
        go_on.set()
    assert [stream.result() for stream in streams] == [list(range(TOKENS))] * STREAMS
    assert [render.result() for render in renders] == [200] * RENDERS
    assert upload.result() == b"HTTP/1.1 200 OK\r\n"


async def _refuses(url: str) -> None:
    """Not ready, and says so to probes and to clients."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client, asyncio.timeout(60):
        while (ready := await client.get("/ready")).status_code == 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (ready.status_code, ready.json()["reason"]) == (503, "the frontend is shutting down")
        assert (await client.get("/health")).status_code == 200
        refused = await client.post(CHAT, json=body_of())
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
    assert refused.headers["retry-after"] in {"1", "2"}
    assert refused.headers["connection"] == "close"


@pytest.mark.parametrize("delay_s", ["600", "0"])
def test_a_frontend_that_is_not_ready_any_more_takes_requests_for_the_drain_delay(
    delay_s: str, tiny: Folder, tmp_path: Path
) -> None:
    """Control: without a delay they are refused before a balancer can know that it should not send them."""
    model, port, address = str(tiny("qwen2-vl")), free_port(), f"ipc://{tmp_path}/worker.sock"
    create_key(tmp_path / "key")
    flags = ("--fleet-key-file", str(tmp_path / "key"), "--drain-delay-s", delay_s)
    with (
        started(tmp_path, "testing", "worker", model, "--listen", address, "--rate", str(RATE), *flags) as worker,
        started(
            tmp_path,
            "frontend",
            model,
            "--port",
            str(port),
            "--preprocessing-processes",
            "1",
            "--worker",
            address,
            *flags,
        ) as frontend,
    ):
        served = Served(frontend, f"http://127.0.0.1:{port}", tmp_path, tmp_path / "frontend.log", 0.0)
        until_ready(served)
        with httpx.Client(base_url=served.url, timeout=60) as client:
            if delay_s == "0":  # or it would end, and refuse nothing
                asyncio.run(asyncio.wait_for(_stop_under_stream(served), 120))
                return
            worker.terminate()  # it takes requests for a while too
            frontend.terminate()
            until(lambda: served.ready() == (False, "the frontend is shutting down"), 30)
            for _ in range(3):
                answer = client.post(CHAT, json=body_of(max_tokens=2))
                assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        for process in (frontend, worker):
            assert process.poll() is None
            process.terminate()
            assert process.wait(HURRY_S) == 0
        assert "takes requests for 600 s (--drain-delay-s)" in served.log.read_text()


async def _stop_under_stream(served: Served) -> None:
    begun = asyncio.Semaphore(0)
    async with client_of(served) as client, asyncio.TaskGroup() as load:
        load.create_task(streamed(client, begun))
        await begun.acquire()
        served.process.terminate()
        await _refuses(served.url)


CUT = {
    CHAT: (body_of(stream=True, max_tokens=10_000), "error"),
    "/v1/responses": ({"input": "Count.", "stream": True, "max_output_tokens": 10_000}, "response.failed"),
    "/v1/messages": (body_of(stream=True, max_tokens=10_000), "error"),
}
"""Streams that outlast a drain, each with what its last event says."""


async def cut_off(client: httpx.AsyncClient, path: str, begun: asyncio.Semaphore) -> str:
    """The last event of a stream."""
    last = ""
    async with client.stream("POST", path, json=CUT[path][0]) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            begun.release()
            if line.startswith("data: {"):
                last = line.removeprefix("data: ")
    return last


async def stop_under_streams(served: Served) -> None:
    """A drain that is too short for what is under way: each stream says so in the form of its API."""
    begun = asyncio.Semaphore(0)
    async with client_of(served) as client, asyncio.TaskGroup() as load:
        streams = {path: load.create_task(cut_off(client, path, begun)) for path in CUT}
        await in_flight(client, len(CUT))
        for _ in range(20 * len(CUT)):
            await begun.acquire()
        served.process.terminate()
    for path, stream in streams.items():
        assert CUT[path][1] in stream.result(), stream.result()
        assert "shutting down" in stream.result(), stream.result()
    assert json.loads(streams[CHAT].result())["error"]["code"] == "not_ready"


def test_streams_that_a_drain_cuts_off_end_with_an_error_event(tiny: Folder, tmp_path: Path) -> None:
    with rehearsing(tiny("qwen2-vl"), tmp_path, drain_s="1") as served:
        asyncio.run(asyncio.wait_for(stop_under_streams(served), 120))
        assert served.process.wait(60) == 0
        log = served.log.read_text()
        assert f"{len(CUT)} requests are cut off: raise --drain-s" in log
        assert log.count("200, cut off, in") == len(CUT)
        assert "Traceback" not in log, log[-3_000:]


def test_a_second_signal_ends_serve_at_once(tiny: Folder, tmp_path: Path) -> None:
    with rehearsing(tiny("qwen2-vl"), tmp_path) as served:
        family, folder = served.processes(), served.folder
        body = body_of(stream=True, max_tokens=10_000)
        with httpx.stream("POST", f"{served.url}{CHAT}", json=body, timeout=60) as response:
            assert response.status_code == 200
            served.process.terminate()
            until(lambda: not served.ready()[0], 30)
            assert served.process.poll() is None  # the stream has hours to go
            began = time.monotonic()
            served.process.send_signal(signal.SIGINT)
            assert served.process.wait(60) == 0
            assert time.monotonic() - began < HURRY_S
        assert not [process for process in family if process.is_running() and process.status() != "zombie"]
        assert not folder.exists()


def test_a_worker_that_is_stopped_answers_what_it_has_and_another_takes_the_rest(tiny: Folder, tmp_path: Path) -> None:
    model, port = str(tiny("qwen2-vl")), free_port()
    create_key(tmp_path / "key")
    addresses = [f"ipc://{tmp_path}/{name}.sock" for name in ("one", "two")]
    key = ("--fleet-key-file", str(tmp_path / "key"), "--drain-delay-s", "0")
    flags = ("--rate", str(RATE), "--drain-s", DRAIN_S)
    with (
        started(tmp_path, "testing", "worker", model, "--listen", addresses[0], *key, *flags) as leaving,
        started(tmp_path, "testing", "worker", model, "--listen", addresses[1], *key, *flags),
        started(
            tmp_path,
            *("frontend", model, "--port", str(port), "--preprocessing-processes", "1", *key),
            *(part for address in addresses for part in ("--worker", address)),
        ) as frontend,
    ):
        served = Served(frontend, f"http://127.0.0.1:{port}", tmp_path, tmp_path / "frontend.log", 0.0)
        until_ready(served)
        until(lambda: served.metric("semel_worker_connected") == 2, 120)
        asyncio.run(asyncio.wait_for(_stop_worker(served, leaving), 240))
        assert leaving.wait(60) == 0
        assert not (tmp_path / "one.sock").exists()
        frontend.terminate()
        assert frontend.wait(60) == 0


async def _stop_worker(served: Served, leaving: subprocess.Popen[bytes]) -> None:
    begun = asyncio.Semaphore(0)
    async with client_of(served) as client, asyncio.TaskGroup() as load:
        streams = [load.create_task(streamed(client, begun)) for _ in range(STREAMS)]
        for _ in range(STREAMS):
            await begun.acquire()
        leaving.terminate()
        streams += [load.create_task(streamed(client, begun)) for _ in range(STREAMS)]
    assert [stream.result() for stream in streams] == [list(range(TOKENS))] * 2 * STREAMS
