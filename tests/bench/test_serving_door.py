"""`semel bench serve --door` without engines: what the third server is started with, asked, counted and judged by."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from semel.errors import ConfigError
from semel.lab.bench.serving import run, servers, statistics
from semel.lab.bench.serving.alternate import Pair
from semel.lab.bench.serving.bench import Bench, Effort, Side
from semel.lab.bench.serving.client import Client
from semel.lab.bench.serving.figures import DOOR_TARGETS, Row, checks_of, compared, counted, with_door
from semel.lab.bench.serving.floor import engine_in_process
from semel.lab.bench.serving.images import Images
from semel.lab.bench.serving.procfs import busiest_s, thread_s
from semel.lab.bench.serving.report import ServeReport
from semel.lab.bench.serving.run import Options, Running, measure
from semel.lab.bench.serving.scenarios import again as again_module
from semel.lab.bench.serving.scenarios import latency
from semel.lab.bench.serving.scenarios.again import again
from semel.lab.bench.serving.scenarios.agent import agent
from semel.lab.bench.serving.scenarios.latency import text
from semel.lab.bench.serving.scenarios.mixed_load import mixed
from semel.lab.bench.serving.scenarios.rendering import render
from semel.lab.bench.serving.screens import Screens
from semel.lab.bench.serving.servers import Launch, Server, door_server, vllm_server
from tests.bench.test_serving_parts import printed

EFFORT = Effort(2, 2, 2, 0.1, 10, 5)


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_DRAWS", 100)


def failing(mine: float, theirs: float) -> Row:
    return counted("mixed: good requests that fail", "requests", mine, theirs)


@pytest.mark.parametrize(("failed", "ok"), [(0, True), (1, False)])
def test_the_door_is_judged_by_targets_of_its_own_next_to_semel(failed: int, ok: bool) -> None:
    again = compared("again: 1024, serving CPU", "ms", Pair([6.0] * 3, [10.0] * 3))
    rows = with_door([failing(0, 9), again], [failing(failed, 8), replace(again, semel=again.semel)])
    report = ServeReport({}, {}, tuple(rows[:1]))
    assert report.ok is ok
    assert {check.name: check.ok for check in checks_of(rows)} == {
        "mixed: good requests that fail": True,
        "mixed: good requests that fail, with the door": ok,
        "again: 1024, serving CPU": True,  # semel has no limit for it
        "again: 1024, serving CPU, with the door": False,
    }
    (told,) = json.loads(report.to_json())["rows"]
    assert (told["door"]["semel"]["value"], told["door"]["vllm"]["value"], told["door"]["ok"]) == (failed, 8, ok)
    shown = printed(ServeReport({}, {}, tuple(rows)), width=160)
    assert " door " in shown
    assert "≤ 0.5×" in shown
    assert " door " not in printed(ServeReport({}, {}, (failing(0, 9),)), width=160)


async def test_a_scenario_is_measured_with_semel_and_then_with_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    async def mixed(bench: Bench) -> list[Row]:
        return [failing(7.0 if bench.sides.semel.has_door else 0.0, 9.0)]

    async def memory(_: Bench) -> list[Row]:
        return [counted("memory: x", "bytes", 1)]

    async def end() -> None:
        pass

    monkeypatch.setattr(run, "SCENARIOS", {"mixed": mixed, "memory": memory})
    client = Client("http://127.0.0.1:1")
    plain, door = Side(Server(()), client), Side(Server(()), client, levels="1")
    bench = Bench(Pair(plain, plain), None, Images(1), EFFORT, lambda *_: None)
    rows = await measure(Running(bench, end, replace(bench, sides=Pair(door, plain))), ["mixed", "memory"])
    assert [row.door and row.door.semel.value for row in rows] == [7.0, None]
    assert [row.door for row in await measure(Running(bench, end), ["mixed", "memory"])] == [None, None]


def test_the_door_is_for_servers_that_are_started_here() -> None:
    for other in ({"baseline": "http://a", "semel": "http://b"}, {"source": Path()}):
        with pytest.raises(ConfigError, match="--door starts three servers"):
            Options(door="1", **other)


def test_a_setting_that_names_no_level_is_refused_before_anything_starts() -> None:
    for setting in ("0", "rendrer", ","):
        with pytest.raises(ConfigError, match="--door: SEMEL="):
            Options(door=setting)
    assert Options(door="images,repair").door == "images,repair"


def test_a_row_and_a_check_that_only_the_door_has_are_kept() -> None:
    (row,) = with_door([], [failing(1, 0)])
    assert [(check.name, check.ok) for check in checks_of([row])] == [
        ("mixed: good requests that fail, with the door", False)
    ]
    report = ServeReport({}, {}, (row,))
    assert not report.ok
    assert json.loads(report.to_json())["rows"][0]["is_door"]
    assert " door " in printed(report, width=160)


_ECHO = """
import os, sys
sys.stderr.write(os.environ.get("DOOR_LINE", "") + "\\n")
sys.stderr.flush()
from http.server import BaseHTTPRequestHandler, HTTPServer
class Echo(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(os.environ.get("SEMEL", "unset").encode())
HTTPServer(("127.0.0.1", int(sys.argv[-1])), Echo).serve_forever()
"""


@pytest.mark.timeout(60)
async def test_only_the_server_with_the_door_has_semel_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "echo.py"
    script.write_text(_ECHO)
    monkeypatch.setattr(servers, "_PYTHON", (sys.executable, str(script)))
    monkeypatch.setenv("SEMEL", "images")
    line = "INFO [levels.py:97] semel: images are decoded when needed; off: worker (SEMEL_LISTEN is not set)"
    launch, said = Launch("MODEL", (), tmp_path, {"DOOR_LINE": line}), []
    for one in (vllm_server(launch), door_server(launch, "images,renderer")):
        async with one as server, Client(server.url) as client:
            said.append(await client.read("/health"))
    assert said == ["0", "images,renderer"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("vLLM alone", "no line of the door"),
        ("semel: the door stays shut, and vLLM runs as it is: vLLM 0.33", "the door stays shut"),
        ("semel: nothing is on; off: images (VLLM_MEDIA_CONNECTOR is x), renderer (y)", "level images, which is off"),
        ("semel: images; off: worker (SEMEL_LISTEN is not set), renderer (y)", "level renderer, which is off"),
    ],
)
async def test_a_door_whose_levels_are_not_on_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, words: str
) -> None:
    script = tmp_path / "echo.py"
    script.write_text(_ECHO)
    monkeypatch.setattr(servers, "_PYTHON", (sys.executable, str(script)))
    launch = Launch("MODEL", (), tmp_path, {"DOOR_LINE": line})
    with pytest.raises(ConfigError, match=words):
        async with door_server(launch, "images,renderer"):
            pass


async def test_the_engine_in_process_is_bare_whatever_this_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, str]] = []

    def popen(*_: object, env: dict[str, str], **__: object) -> None:
        started.append(env)
        raise OSError("no process")

    monkeypatch.setattr("subprocess.Popen", popen)
    monkeypatch.setenv("SEMEL", "1")
    with pytest.raises(OSError, match="no process"):
        async with engine_in_process(Launch("MODEL", (), tmp_path)):
            pass
    assert started[0]["SEMEL"] == "0"


def test_the_busiest_thread_is_none_that_has_a_loop() -> None:
    pids = [os.getpid()]
    before = thread_s(pids)
    found: list[float] = []

    def work() -> None:
        sum(range(3_000_000))
        found.append(busiest_s(pids, before))

    busy = threading.Thread(target=work)
    busy.start()
    sum(range(9_000_000))
    busy.join()
    assert 0 < found[0] < thread_s(pids)[os.getpid()] - before[os.getpid()]


class Fake:
    """A server that answers at once. As vLLM it decodes an image each time, with the door once."""

    def __init__(self, *, is_right: bool = True) -> None:
        self.images: Counter[bytes] = Counter()
        self.is_right = is_right

    async def answer(self, request: web.Request) -> web.Response:
        messages = (await request.json())["messages"]
        parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
        urls = [part["image_url"]["url"] for part in parts if "image_url" in part]
        self.images.update(hashlib.sha256(url.encode()).digest() for url in urls)
        return web.json_response({"usage": {"prompt_tokens": 10 * len(urls)}})

    async def metrics(self, _: web.Request) -> web.Response:
        new = len(self.images)
        values = {
            "semel_encoder_planned": new,
            "vllm:mm_cache_queries": self.images.total(),
            "vllm:mm_cache_hits": self.images.total() - new,
        }
        lines = [f"# TYPE {name} counter\n{name}_total {value}\n" for name, value in values.items()]
        events = {"preprocessed": new, "decodes": 0 if self.is_right else self.images.total() - new}
        lines.append("# TYPE semel_vllm_plugin_events counter\n")
        lines += [f'semel_vllm_plugin_events_total{{event="{name}"}} {value}\n' for name, value in events.items()]
        return web.Response(text="".join(lines))

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"max_model_len": 4_096}]})

    async def side(self, stack: AsyncExitStack, **fields: Any) -> Side:
        app = web.Application(client_max_size=1 << 28)
        posts = [web.post(path, self.answer) for path in ("/v1/chat/completions", "/v1/chat/completions/render")]
        app.add_routes([*posts, web.get("/metrics", self.metrics), web.get("/v1/models", self.models)])
        runner = web.AppRunner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return Side(Server((url,), (os.getpid(),)), await stack.enter_async_context(Client(url)), **fields)


async def bench_of(stack: AsyncExitStack, *, is_right: bool = True) -> Bench:
    door = await Fake(is_right=is_right).side(stack, levels="1")
    return Bench(Pair(door, await Fake().side(stack)), None, Images(1), EFFORT, lambda *_, **__: None)


async def test_every_target_of_the_door_is_of_a_row_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Screens, "draw", lambda one: os.urandom(1_000))  # noqa: ARG005
    monkeypatch.setattr(Images, "draw", lambda one, _: os.urandom(1_000))  # noqa: ARG005
    for module, name in ((latency, "_TEXTS"), (again_module, "_CPU_REPEATS")):
        monkeypatch.setattr(module, name, 1)
    assert {name.partition(":")[0] for name in DOOR_TARGETS} <= set(run._WITH_DOOR)
    async with AsyncExitStack() as stack:
        bench = await bench_of(stack)
        rows = [row for scenario in (text, again, agent, render, mixed) for row in await scenario(bench)]
    assert DOOR_TARGETS.keys() <= {row.name for row in rows}


@pytest.mark.parametrize("is_right", [True, False])
async def test_the_doors_decodes_in_an_agents_turns_are_read_from_its_metrics(
    is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: a door that decodes an image each time misses its target."""
    monkeypatch.setattr(Screens, "draw", lambda one: os.urandom(1_000))  # noqa: ARG005
    async with AsyncExitStack() as stack:
        found = await agent(await bench_of(stack, is_right=is_right))
    rows = {row.name: row for row in with_door(found, found)}
    decoded = rows["agent: 5 turns, data URLs, decoded"]
    assert (decoded.semel.value, decoded.vllm and decoded.vllm.value) == (5 if is_right else 15, 15)
    judged = rows["agent: images not decoded, preprocessed and encoded once"].door
    assert judged is not None
    assert judged.ok is is_right
    assert not [name for name in rows if "by reference" in name]
