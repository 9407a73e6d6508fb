"""S12 by the clock: what it costs to name another tenant's media, and what nobody has, is the same to the last step.

The clock counts the bytecodes of this process, as in `test_s12_routes`, which compares answers and counted work. The
objects of this store are a dictionary: nothing of a request waits, so that two that are alike take the same steps. All
cases share one frontend: what is refused leaves nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from semel.cache import LruCache
from semel.fairness.circuit_breaker import CircuitBreaker
from semel.frontend.middleware.refusal_rate import RefusalLimits
from semel.frontend.service import ServedModel
from semel.render import ChatRenderer
from semel.render.file_sources import FileSources
from semel.render.media.names import MediaNames
from semel.render.media.shared_names import SharedNames
from semel.store.records import SealedRecords
from semel.store.store import MediaStore
from tests.frontend.rig import KEY, Rig, rig
from tests.operations import counting_operations
from tests.render.drawn import FEATURE_BYTES, Drawing, image_part
from tests.security.worlds import ACME, CHAT, KEYS, RENDER, UMBRA, share_everything, with_part
from tests.store.stores import PlainObjects, bindings_over

FILES = "/v1/files"
RESPONSES = "/v1/responses"
PAIRS = 2


class NoTimers(CircuitBreaker):
    """Without timeouts: the steps of an event loop with timers depend on those of all requests before."""

    async def call(self, tenant: str, operation: Callable[[], Awaitable[Any]]) -> Any:
        del tenant
        return await operation()


@asynccontextmanager
async def world(home: Path, renderer: ChatRenderer) -> AsyncIterator[Rig]:
    drawing = Drawing(renderer, LruCache(256 * FEATURE_BYTES))
    async with rig(home, drawing.pipeline, engine_bytes=256 * FEATURE_BYTES, keys=KEYS) as made:
        store = MediaStore(PlainObjects(), key=KEY, capacity_bytes=1 << 30, ttl_s=1_000_000)
        await store.refresh()
        made.service.media_store, serving = store, made.service.serving()
        made.service.refusals = RefusalLimits(per_s=0)  # or refusals would wait, by the clock
        names = MediaNames()
        shared = SharedNames(await bindings_over(PlainObjects()), names)
        shared._breaker = NoTimers(1.0, 1.0)
        pipeline = replace(serving.pipeline, files=FileSources(store, names, shared))
        records = MediaStore(PlainObjects(), key=KEY, capacity_bytes=1 << 30, ttl_s=1_000_000)
        await records.refresh()
        made.service.response_records = SealedRecords(records, KEY)
        made.service.begin(ServedModel(serving.fleet, serving.contract, pipeline))
        yield made


async def ask(app: Rig, key: str, method: str, path: str, **request: Any) -> Any:
    return await app.client.request(method, path, headers={"authorization": f"Bearer {key}"}, **request)


async def uploaded(app: Rig, number: int) -> str:
    """The id of a file of acme's."""
    request = {"files": {"file": ("a.png", str(number).encode())}, "data": {"purpose": "vision"}}
    return str((await ask(app, ACME, "POST", FILES, **request)).json()["id"])


async def returned(app: Rig, number: int) -> str:
    """The id of an image that acme has sent."""
    body = {**with_part(image_part(number)), "return_media_ids": True}
    (media_id,) = (await ask(app, ACME, "POST", CHAT, json=body)).json()["media_ids"]
    return str(media_id)


async def named(app: Rig, number: int) -> str:
    """A name for an image that acme has sent."""
    name = f"name-{number:03}"
    reply = await ask(app, ACME, "POST", CHAT, json=with_part({**image_part(number), "uuid": name}))
    assert reply.status_code == 200
    return name


def _file(field: str, file_id: str) -> dict[str, Any]:
    return {"type": field, field: {"file_id": file_id}}


def _name(field: str, name: str) -> dict[str, Any]:
    return {"type": field, field: None, "uuid": name}


async def answered(app: Rig, number: int) -> str:
    """The id of a stored response of acme's."""
    return str((await ask(app, ACME, "POST", RESPONSES, json={"input": f"say {number}"})).json()["id"])


Secret = Callable[[Rig, int], Any]
PARTS: Mapping[str, tuple[Secret, Callable[[str], dict[str, Any]]]] = {
    **{
        f"{of} in {field}": (secret, partial(_file, field))
        for of, secret in (("a file", uploaded), ("an id that was returned", returned))
        for field in ("file", "image_url", "audio_url", "video_url")
    },
    **{
        f"a uuid in {field}": (named, partial(_name, field))
        for field in ("image_url", "audio_url", "video_url", "input_audio")
    },
}
ROUTES = {
    "retrieve": ("GET", "/v1/files/{id}"),
    "content": ("GET", "/v1/files/{id}/content"),
    "delete": ("DELETE", "/v1/files/{id}"),
    "after": ("GET", "/v1/files?after={id}"),
}
RESPONSE_ROUTES = {
    "retrieve": ("GET", "/{id}"),
    "delete": ("DELETE", "/{id}"),
    "items": ("GET", "/{id}/input_items"),
    "continue": ("POST", ""),
    "count": ("POST", "/input_tokens"),
}


def nobody_s(secret: str) -> str:
    """What looks like it, and nobody has."""
    if secret.startswith("resp_"):
        return f"resp_{secret[:4:-1]}"
    head, dash, tail = secret.partition("-")
    return f"{head}{dash}{tail[::-1]}" if head == "file" else f"none-{tail}"


async def steps(app: Rig, method: str, path: str, **request: Any) -> int:
    """The steps of a request: nothing of it stays."""
    with counting_operations(own=True) as counted:
        reply = await ask(app, UMBRA, method, path, **request)
    assert reply.status_code in (404, 400, 200)  # 400: the model takes no audio; 200: a wrong implementation
    return counted.operations


async def check_steps(
    app: Rig, secret: Secret, request: Callable[[str], tuple[str, str, Mapping[str, Any]]], pairs: int = PAIRS
) -> None:
    """What acme has, and what nobody has, cost the same, exactly."""
    secrets = [await secret(app, number) for number in range(20, 21 + pairs)]
    differences = []
    for index, one in enumerate(secrets):
        costs = {}
        for name in (one, nobody_s(one)) if index % 2 else (nobody_s(one), one):
            method, path, rest = request(name)
            costs[name] = await steps(app, method, path, **rest)
        differences.append(costs[one] - costs[nobody_s(one)])
    assert not any(differences[1:]), differences  # the first did what is done once


@pytest.fixture(scope="module")
async def app(tmp_path_factory: pytest.TempPathFactory, parts_renderer: ChatRenderer) -> AsyncIterator[Rig]:
    async with world(tmp_path_factory.mktemp("w"), parts_renderer) as made:
        yield made


@pytest.mark.parametrize("path", [CHAT, RENDER, "/tokenize"])
@pytest.mark.parametrize("case", PARTS)
async def test_not_one_step_tells_whether_another_tenant_has_what_is_named(app: Rig, case: str, path: str) -> None:
    secret, part = PARTS[case]
    await check_steps(app, secret, lambda one: ("POST", path, {"json": with_part(part(one))}))


@pytest.mark.parametrize("route", ROUTES)
async def test_not_one_step_of_the_routes_of_files_tells_whether_another_tenant_has_one(app: Rig, route: str) -> None:
    method, path = ROUTES[route]
    await check_steps(app, uploaded, lambda one: (method, path.format(id=one), {}))


@pytest.mark.parametrize("route", RESPONSE_ROUTES)
async def test_not_one_step_of_the_routes_of_responses_tells_whether_another_tenant_has_one(
    app: Rig, route: str
) -> None:
    method, path = RESPONSE_ROUTES[route]

    def request(one: str) -> tuple[str, str, Mapping[str, Any]]:
        body = {"json": {"input": "go on", "previous_response_id": one}} if method == "POST" else {}
        return method, RESPONSES + path.format(id=one), body

    await check_steps(app, answered, request)


@pytest.mark.parametrize("case", ["a file in file", "an id that was returned in image_url", "a uuid in image_url"])
async def test_a_mutant_that_shares_media_is_found_by_its_steps(
    tmp_path: Path, parts_renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    share_everything(monkeypatch)
    secret, part = PARTS[case]
    async with world(tmp_path, parts_renderer) as app:
        with pytest.raises(AssertionError):
            await check_steps(app, secret, lambda one: ("POST", RENDER, {"json": with_part(part(one))}), pairs=1)


async def test_a_mutant_that_looks_at_a_foreign_file_a_little_longer_is_found_by_its_steps(
    tmp_path: Path, parts_renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is the same: only the clock tells."""
    find = MediaStore.find

    async def mutant(self: MediaStore, tenant: str, digest: Any) -> Any:
        if digest in self._index._entries:
            for _ in range(3):
                pass
        return await find(self, tenant, digest)

    monkeypatch.setattr(MediaStore, "find", mutant)
    async with world(tmp_path, parts_renderer) as app:
        with pytest.raises(AssertionError):
            await check_steps(app, uploaded, lambda one: ("GET", f"{FILES}/{one}", {}), pairs=1)
