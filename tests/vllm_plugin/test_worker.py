"""A plain vLLM server as a worker of a fleet: vLLM's app and its `AsyncLLM` are real, only the engine core is not."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from semel.compose import compose_pipeline
from semel.core import Digest, Feature, Submission
from semel.engine.vllm.compat.shared_item_cache import SharedItemCache
from semel.engine.vllm.engine import VllmEngine
from semel.errors import SemelError
from semel.fleet.worker import RemoteWorker
from semel.lab.prove.processes import FEATURE_BYTES
from semel.render import ChatRequest, Pipeline, Rendered
from semel.settings.secrets import create_key, read_key
from semel.vllm_plugin import worker as level
from semel.vllm_plugin.levels import LevelOff
from semel.vllm_plugin.worker import WorkerPlugin, install
from semel.wire.zmq import Backoff, FrontendLink
from tests.engine.coreless import Core, without_core
from tests.engine.parity import draw_image
from tests.serve.served import image_url
from tests.waiting import until
from tools.fleet.door import STREAMS, has_failed

pytestmark = [pytest.mark.engine, pytest.mark.timeout(580)]

FLAGS = ("--enforce-eager", "--dtype", "float32", "--seed", "0", "--max-model-len", "2048")
IMAGES, HELD = 40, 4
NUMBERS = count()

Folder = Callable[[str], Path]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a key, and the variables that a user sets."""
    from vllm import plugins

    create_key(tmp_path / "key")
    monkeypatch.setenv("SEMEL_LISTEN", f"ipc://{tmp_path}/w.sock")
    monkeypatch.setenv("SEMEL_FLEET_KEY_FILE", str(tmp_path / "key"))
    monkeypatch.setattr(plugins, "load_endpoint_plugins", plugins.load_endpoint_plugins)  # put back at the end
    loggers = [(one, one.level, one.handlers) for one in (logging.root, logging.getLogger("semel"))]
    yield tmp_path
    for one, before, handlers in loggers:  # vLLM's server changes the first, the level the other
        one.setLevel(before)
        one.handlers = handlers


def test_the_level_adds_one_plug_in_for_servers_that_generate_and_leaves_those_of_others(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import plugins

    other = SimpleNamespace(name="another product's")
    monkeypatch.setattr(plugins, "load_endpoint_plugins", lambda _=None: [other])
    assert install() == install() == f"frontends are served at ipc://{home}/w.sock"  # twice, as after a fork
    assert [type(one) for one in plugins.load_endpoint_plugins(("generate",))] == [SimpleNamespace, WorkerPlugin]
    for tasks in (("embed",), ("render",), None):
        assert plugins.load_endpoint_plugins(tasks) == [other]


@pytest.mark.parametrize(
    ("variables", "version", "reason"),
    [
        ({"SEMEL_LISTEN": ""}, "0.32.0", "SEMEL_LISTEN is not set"),
        ({"SEMEL_FLEET_KEY_FILE": ""}, "0.32.0", "SEMEL_KEY_DIR is not set: `semel key make DIR` makes DIR/worker"),
        ({"SEMEL_FLEET_KEY_FILE": "/no/such/key"}, "0.32.0", "/no/such/key"),
        ({"SEMEL_KEY_DIR": "/no/such/folder"}, "0.32.0", "keep one of them"),
        ({"SEMEL": "images,worker"}, "0.32.0", "^it needs the level repair$"),
        ({}, "0.31.1", r"it needs vLLM 0\.32, and 0\.31\.1 is installed"),
    ],
)
def test_without_an_address_keys_or_a_tested_vllm_the_level_is_off_and_nothing_is_hooked(
    variables: dict[str, str], version: str, reason: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import plugins

    before = plugins.load_endpoint_plugins
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(level, "installed_version", lambda: version)
    with pytest.raises(LevelOff, match=reason):
        install()
    assert plugins.load_endpoint_plugins is before


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"api_server_count": 2, "data_parallel_size": 1}, "several API servers"),
        ({"api_server_count": None, "data_parallel_size": 2}, "data parallel"),
        (
            {"api_server_count": None, "data_parallel_size": 1, "mm_processor_cache_type": "shm"},
            "--mm-processor-cache-type shm",
        ),
        ({"api_server_count": None}, "has no attribute 'data_parallel_size'"),
    ],
)
async def test_what_cannot_be_a_worker_and_any_fault_of_ours_is_one_line_and_vllms_server_begins(
    arguments: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "vllm.semel"):
        await WorkerPlugin("ipc:///w.sock").init_state(None, SimpleNamespace(), Namespace(**arguments))
    (line,) = [record.getMessage() for record in caplog.records if record.name == "vllm.semel"]
    assert line.startswith("semel: no frontends are served at ipc:///w.sock: ")
    assert reason in line


async def ask_app(app: Any, image: bytes) -> httpx.Response:
    content = [image_url(image), {"type": "text", "text": "what is in this picture ?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "ignore_eos": True}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://vllm") as client:
        return await client.post("/v1/chat/completions", json=body, timeout=60)


@dataclass
class Server:
    """vLLM's own server, and a frontend's side of the worker in it."""

    llm: Any
    core: Core
    app: Any
    remote: RemoteWorker
    pipeline: Pipeline
    images: list[bytes]
    rendered: dict[int, Rendered] = field(default_factory=dict)

    async def ask_vllm(self, image: int) -> httpx.Response:
        """Ask on vLLM's own route."""
        return await ask_app(self.app, self.images[image])

    async def render(self, image: int) -> Rendered:
        if image not in self.rendered:
            content = [image_url(self.images[image]), {"type": "text", "text": "what is in this picture ?"}]
            self.rendered[image] = await self.pipeline.chat(ChatRequest([{"role": "user", "content": content}]))
        return self.rendered[image]

    async def submit(self, image: int, tokens: int = 2) -> Any:
        rendered = await self.render(image)

        async def make(digest: Digest) -> Feature:
            return rendered.features[digest]

        sampling = {"max_tokens": tokens, "ignore_eos": True}
        submission = Submission(f"r{next(NUMBERS)}", rendered.prompt, {}, sampling)
        return await self.remote.submit(submission, make)

    async def ask_semel(self, image: int, tokens: int = 2) -> tuple[int, ...]:
        """Ask through the worker, as a frontend does."""
        stream = await self.submit(image, tokens)
        try:
            return tuple([token async for output in stream for token in output.token_ids])
        finally:
            await stream.close()

    def held(self) -> set[Digest]:
        """Return semel's items in the mirror of vLLM's item cache."""
        return {one for one in self.digests() if one.hex() in self.llm.renderer.mm_processor_cache._cache}

    def known(self) -> set[Digest]:
        """Return those that the frontend knows of."""
        return {one for one in self.digests() if self.remote.knows(one)}

    def digests(self) -> set[Digest]:
        return {digest for rendered in self.rendered.values() for digest in rendered.features}


@asynccontextmanager
async def running_app(folder: Path, *flags: str) -> AsyncIterator[tuple[Any, Core, Any]]:
    """vLLM's app on an engine without a core, with the level `worker`."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    install()
    cache_gb = (HELD + 0.5) * FEATURE_BYTES / 2**30
    words = ["--model", str(folder), *FLAGS, "--mm-processor-cache-gb", f"{cache_gb:.9f}", *flags]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    with without_core() as cores:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))
    core = cores[0]
    core.pace_s = 0.001
    app = build_app(args, ("generate",), llm.model_config)
    await init_app_state(llm, app.state, args, ("generate",))
    try:
        yield llm, core, app
    finally:
        llm.shutdown()


@asynccontextmanager
async def serving(folder: Path, home: Path, *flags: str) -> AsyncIterator[Server]:
    """vLLM's app, and a frontend that is connected to the worker in it."""
    rng = np.random.default_rng(0)
    images = [draw_image(rng, side=56) for _ in range(IMAGES)]
    async with AsyncExitStack() as stack:
        llm, core, app = await stack.enter_async_context(running_app(folder, *flags))
        key = read_key(home / "key")
        link = FrontendLink(f"ipc://{home}/w.sock", key=key, frontend_id="f", backoff=Backoff(first_s=0.01, max_s=0.05))
        await stack.enter_async_context(link)
        remote = RemoteWorker(link)
        running = asyncio.create_task(remote.run())
        stack.callback(running.cancel)
        stack.callback(app.state.semel_worker.cancel)
        await until(lambda: remote.is_connected)
        yield Server(llm, core, app, remote, compose_pipeline(folder, remote.contract.target, key), images)


async def test_on_both_routes_at_once_no_request_of_the_fleet_fails_and_no_announcement_is_lost(
    tiny: Folder, home: Path
) -> None:
    """A cache for a tenth of the images, a quarter of the requests aborted. vLLM's own route may miss: `repair`."""
    draw = random.Random(1)
    async with serving(tiny("qwen2-vl"), home) as server:
        answers: list[tuple[int, ...]] = []
        failed: list[int] = []
        room = asyncio.Semaphore(12)

        async def one(number: int) -> None:
            image, is_aborted, wait_s = draw.randrange(IMAGES), draw.random() < 0.25, draw.random() * 0.03
            async with room:
                asking = server.ask_vllm(image) if number % 2 else server.ask_semel(image)
                try:
                    async with asyncio.timeout(wait_s if is_aborted else 60):
                        answer = await asking
                except TimeoutError:
                    return
                if isinstance(answer, tuple):
                    answers.append(answer)
                elif answer.status_code != 200:
                    failed.append(answer.status_code)

        await asyncio.gather(*map(one, range(200)))
        assert len(answers) > 60
        assert set(answers) == {(5, 5)}
        names = {digest.hex() for digest in server.digests()}
        assert len(failed) <= len(server.core.missed)
        assert not names & set(server.core.missed), "the mirror never names what the engine core has evicted"
        await until(lambda: server.known() == server.held())
        assert {digest.hex() for digest in server.held()} <= set(server.core.received._cache)


async def test_a_shutdown_of_vllm_drains_the_worker_before_its_engine_ends(tiny: Folder, home: Path) -> None:
    """As on SIGTERM: vLLM's server shuts its engine down in a thread, with the time of --shutdown-timeout."""
    async with serving(tiny("qwen2-vl"), home, "--shutdown-timeout", "30") as server:
        stream = await server.submit(0, tokens=200)
        outputs = stream.__aiter__()
        await anext(outputs)
        server.core.pace_s = 0.05  # it goes on while the shutdown begins
        ending = asyncio.create_task(asyncio.to_thread(server.llm.shutdown, timeout=30.0))
        await until(lambda: server.remote.reason != "")
        assert server.core.ended_with == []
        with pytest.raises(SemelError):  # nothing more is taken
            await server.ask_semel(1)
        server.core.pace_s = 0.001
        assert sum([len(output.token_ids) async for output in outputs]) == 199
        await stream.close()
        await ending
        assert server.core.ended_with == [0]
        assert server.app.state.semel_worker.done()


async def test_without_time_to_drain_a_stream_ends_as_lost_and_not_as_an_answer(tiny: Folder, home: Path) -> None:
    """vLLM's default. What had not begun goes to another worker; an aborted answer would count as one."""
    async with serving(tiny("qwen2-vl"), home) as server:
        stream = await server.submit(0, tokens=1_000)
        outputs = stream.__aiter__()
        await anext(outputs)
        server.core.pace_s = 0.05
        await asyncio.to_thread(server.llm.shutdown, timeout=0)
        with pytest.raises(SemelError):
            _ = [output async for output in outputs]
        await stream.close()


async def test_a_worker_that_ends_leaves_vllms_engine_running(tiny: Folder, home: Path) -> None:
    async with serving(tiny("qwen2-vl"), home) as server:
        assert await server.ask_semel(0) == (5, 5)
        server.app.state.semel_worker.cancel()
        await until(server.app.state.semel_worker.done)
        assert server.core.ended_with == []
        assert (await server.ask_vllm(0)).status_code == 200


@pytest.mark.parametrize(
    ("warm_s", "reason"), [(120.0, "cannot listen on"), (0.0, "the engine's first requests took more than 0 s")]
)
async def test_a_worker_that_cannot_begin_is_one_line_and_leaves_vllm_as_it_was(
    warm_s: float,
    reason: str,
    tiny: Folder,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its port is another's, or its engine does not answer."""
    released: list[VllmEngine] = []
    release = VllmEngine.release

    async def recorded(engine: VllmEngine) -> None:
        released.append(engine)
        await release(engine)

    monkeypatch.setattr(VllmEngine, "release", recorded)
    monkeypatch.setattr(level, "_WARM_S", warm_s)
    monkeypatch.setattr(level, "logger", logging.getLogger("worker-level"))  # vLLM may keep its own from the root
    with socket.create_server(("127.0.0.1", 0)) as other, caplog.at_level(logging.INFO, "worker-level"):
        monkeypatch.setenv("SEMEL_LISTEN", f"tcp://127.0.0.1:{other.getsockname()[1]}")
        async with running_app(tiny("qwen2-vl")) as (llm, _, app):
            (line,) = [record.getMessage() for record in caplog.records if record.name == "worker-level"]
            assert line.startswith("semel: no frontends are served at tcp://127.0.0.1:")
            assert reason in line
            assert len(released) == 1
            hooked = (llm.shutdown, llm.engine_core.add_request_async, llm.renderer.mm_processor_cache.is_cached_item)
            assert not {one.__module__ for one in hooked} & {level.__name__, SharedItemCache.__module__}
            answer = await ask_app(app, draw_image(np.random.default_rng(0), side=56))
            assert answer.status_code == 200


@pytest.mark.parametrize("fault", ["failures", "different", "lost_announcements", "exit_code", "killed_failed"])
def test_a_load_on_both_routes_fails_if_its_run_shows_a_fault(fault: str) -> None:
    clean = {"good": 9, "failures": 0, "different": 0, "lost_announcements": 0, "exit_code": 0, "drained": 2 * STREAMS}
    assert not has_failed(clean | {"misses": 3, "resubmissions": 1})
    assert has_failed(clean | {fault: 1})
    assert has_failed(clean | {"drained": 2 * STREAMS - 1})
    assert has_failed(clean | {"good": 0})
