"""vLLM's routes for RL at the admin address: paths, fields and answers are those of vLLM's own server."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp

from semel.engine.protocol import PauseMode, WeightUpdate
from semel.telemetry import Meter
from semel.worker.admin import admin_document, create_admin_app
from tests.frontend.conformance import POSITIVE, served
from tests.worker.stored import Store
from tests.worker.test_control import Switch

pytestmark = pytest.mark.timeout(60)

__all__ = ["KEY", "PATHS", "operated"]

KEY = "an-operator-s-key-0123456789"
BEARER = {"Authorization": f"Bearer {KEY}"}
PATHS = admin_document(has_control=True)["paths"].keys() - admin_document()["paths"].keys()
BODY_NEEDED = {
    *("/collective_rpc", "/update_weight_version", "/weight_checker"),
    *("/init_weight_transfer_engine", "/update_weights"),
}


class Operated:
    """A worker that does what its operator says at once."""

    def __init__(self) -> None:
        self.engine = Switch()
        self.aborted: list[list[str]] = []

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        await self.engine.pause(mode, clear_cache=clear_cache)

    async def resume(self) -> None:
        await self.engine.resume()

    async def sleep(self, level: int, mode: PauseMode) -> None:
        await self.engine.sleep(level, mode)

    async def wake_up(self, tags: Sequence[str] | None) -> bool:
        return await self.engine.wake_up(tags)

    async def update_weights(self, step: WeightUpdate, info: Any = None) -> None:
        await self.engine.update_weights(step, info)

    async def collective_rpc(self, *call: Any) -> list[Any]:
        return await self.engine.collective_rpc(*call)

    async def abort_requests(self, request_ids: list[str]) -> int:
        self.aborted.append(request_ids)
        return len(request_ids)


@contextmanager
def operated(key: str | None = KEY, *, has_control: bool = True) -> Iterator[tuple[Operated, httpx.Client]]:
    worker = Operated()

    @asynccontextmanager
    async def app() -> AsyncIterator[ASGIApp]:
        store = Store()
        control = worker if has_control else None
        yield create_admin_app(store, Meter(), key=key, count=lambda *_: None, reset=store.reset, control=control)

    with served(app) as made, httpx.Client(base_url=made.url, headers=BEARER, timeout=20) as client:
        yield worker, client


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Operated, httpx.Client]]:
    with operated() as made:
        yield made


@pytest.mark.parametrize(
    ("path", "body", "call", "answer"),
    [
        ("/pause", None, ("pause", "abort", True), {"status": "paused"}),
        ("/pause?mode=keep&clear_cache=false", None, ("pause", "keep", False), {"status": "paused"}),
        ("/resume", None, ("resume",), {"status": "resumed"}),
        ("/sleep", None, ("sleep", 1, "abort"), {"status": "sleeping", "level": 1}),
        ("/sleep?level=2&mode=wait", None, ("sleep", 2, "wait"), {"status": "sleeping", "level": 2}),
        ("/wake_up?tags=weights", None, ("wake_up", ["weights"]), {"status": "sleeping", "tags": ["weights"]}),
        ("/wake_up", None, ("wake_up", None), {"status": "awake", "tags": None}),
        ("/release_kv_cache_memory", None, ("release_kv_cache_memory",), {"status": "kv_cache_released"}),
        (
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": "/w"}, "timeout": 5},
            ("collective_rpc", "reload_weights", (), {"weights_path": "/w"}, 5.0),
            {"results": [None, {"a": "1"}, "5"]},
        ),
        (
            "/init_weight_transfer_engine",
            {"init_info": {"port": 1}},
            ("init_weight_transfer_engine", {"port": 1}),
            {"message": "Weight transfer initialized"},
        ),
        ("/start_weight_update", None, ("start_weight_update", None), {"message": "Weight update started"}),
        (
            "/update_weights",
            {"update_info": [{"names": ["a"]}]},
            ("update_weights", [{"names": ["a"]}]),
            {"message": "Weights updated"},
        ),
        ("/finish_weight_update", None, ("finish_weight_update", None), {"message": "Weight update finished"}),
        (
            "/finish_weight_update",
            {"weight_version": "7"},
            ("finish_weight_update", "7"),
            {"message": "Weight update finished"},
        ),
        (
            "/weight_checker",
            {"action": "reset"},
            ("collective_rpc", "reset_weights", (), {}, None),
            {"status": "reset"},
        ),
        ("/reset_prefix_cache?reset_external=true", None, ("forget_prefixes", True), {"success": True}),
        ("/reset_mm_cache", None, ("forget_items",), None),
        ("/reset_encoder_cache", None, ("forget_outputs",), None),
    ],
)
def test_a_call_reaches_the_engine_as_it_reaches_vllms_and_is_answered_so(
    both: tuple[Operated, httpx.Client], path: str, body: Any, call: tuple[Any, ...], answer: Any
) -> None:
    worker, client = both
    response = client.post(path, json=body) if body is not None else client.post(path)
    assert (response.status_code, response.json() if response.content else None) == (200, answer)
    assert worker.engine.calls[-1] == call


def test_states_and_the_name_of_the_weights_are_told(both: tuple[Operated, httpx.Client]) -> None:
    worker, client = both
    client.post("/resume")
    assert client.get("/is_paused").json() == {"is_paused": False}
    client.post("/pause")
    assert client.get("/is_paused").json() == {"is_paused": True}
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert client.get("/weight_info").json() == {"weight_version": "default"}
    assert client.post("/update_weight_version", json={"new_version": "3"}).json() == {
        "success": True,
        "new_version": "3",
    }
    assert client.get("/weight_info").json() == {"weight_version": "3"}
    assert client.get("/get_world_size").json() == {"world_size": 4}
    assert client.get("/get_world_size?include_dp=false").json() == {"world_size": 2}
    assert client.post("/abort_requests", json={"request_ids": ["a", "b"]}).json() == {
        "status": "aborted",
        "aborted": 2,
    }
    assert client.post("/abort_requests").json() == {"status": "aborted", "aborted": 0}
    assert worker.aborted == [["a", "b"], []]


def test_checksums_are_told_and_compared(both: tuple[Operated, httpx.Client]) -> None:
    _, client = both
    sums = {"tp0:a": "1", "tp1:a": "2"}
    assert client.post("/weight_checker", json={"action": "checksum"}).json() == {"checksums": sums}
    same = client.post("/weight_checker", json={"action": "compare", "baseline": sums})
    assert same.json() == {"match": True, "mismatches": []}
    other = client.post("/weight_checker", json={"action": "compare", "baseline": {**sums, "tp1:a": "3", "b": "4"}})
    assert other.json() == {"match": False, "mismatches": ["b", "tp1:a"]}


@pytest.mark.parametrize(
    ("path", "content", "word"),
    [
        ("/pause?mode=stop", b"", "mode: abort, wait or keep"),
        ("/pause?clear_cache=perhaps", b"", "clear_cache: true or false"),
        ("/sleep?level=3", b"", "level: 0, 1 or 2"),
        ("/collective_rpc", b"", "method: "),
        ("/collective_rpc", b"[]", "not a JSON object"),
        ("/collective_rpc", b'{"method": "reload_weights", "args": "x"}', "args: "),
        ("/update_weights", b'{"update_info": "x"}', "update_info: "),
        ("/update_weight_version", b"{}", "new_version: "),
        ("/weight_checker", b'{"action": "compare"}', "baseline: "),
        ("/weight_checker", b'{"action": "show"}', "action: "),
        ("/abort_requests", b'{"request_ids": "a"}', "request_ids: "),
        ("/reset_prefix_cache?reset_running_requests=true", b"", "reset_running_requests: "),
    ],
)
def test_what_vllm_would_not_take_is_refused_and_nothing_is_called(
    both: tuple[Operated, httpx.Client], path: str, content: bytes, word: str
) -> None:
    worker, client = both
    before = len(worker.engine.calls)
    response = client.post(path, content=content)
    assert response.status_code == 400
    assert word in response.json()["error"]["message"]
    assert len(worker.engine.calls) == before


def test_an_engine_that_fails_is_500_without_its_words_S7(both: tuple[Operated, httpx.Client]) -> None:
    worker, client = both
    worker.engine.fails = True
    try:
        response = client.post("/start_weight_update")
    finally:
        worker.engine.fails = False
    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_failed")


def test_every_answer_is_in_the_document() -> None:
    worker = Operated()

    @asynccontextmanager
    async def app() -> AsyncIterator[ASGIApp]:
        store = Store()
        yield create_admin_app(store, Meter(), key=KEY, count=lambda *_: None, reset=store.reset, control=worker)

    document = admin_document(has_control=True)
    operations = {f"{method.upper()} {path}" for path in PATHS for method in document["paths"][path]}
    with served(app, BEARER) as made:
        for label in operations:
            made.examine(label, POSITIVE, count=1, headers=BEARER)
    statuses = {label: status for label, status, _ in made.answers}
    assert statuses == {label: 400 if label.split()[1] in BODY_NEEDED else 200 for label in operations}


def test_many_calls_at_once_are_answered(both: tuple[Operated, httpx.Client]) -> None:
    _, client = both
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda: statuses.append(client.get("/is_paused").status_code)) for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert statuses == [200] * 16
