"""Two worlds for one tenant: in one another has been busy, in the other it never was. Nobody may tell them apart.

What a tenant can tell is a view: the answer to its request, and the work that was done for it, since work takes time.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from msgspec.msgpack import Ext

from semel.cache import LruCache
from semel.core import Digest, Feature, Field, Identity, Key, Keyring, Layout, Media, Modality, Tenant, Tensor
from semel.fleet.worker import RemoteWorker
from semel.frontend.items import client_features as given
from semel.frontend.items.ownership import feature_digest
from semel.frontend.limits import RefusalLimits
from semel.frontend.routes.render import SAFETENSORS
from semel.frontend.service import ServedModel
from semel.interchange.safetensors import FeatureEntry, read_file, write
from semel.media.decode.clip_cuts import wav_of
from semel.render import ChatRenderer, Pipeline
from semel.render.file_sources import FileSources
from semel.render.media.names import MediaNames
from semel.store.names import owner_name
from semel.store.records import SealedRecords
from tests.frontend import rig as rigs
from tests.frontend.hearing import TOKENIZER
from tests.frontend.rig import Rig, rig
from tests.render.drawn import FEATURE_BYTES, Drawing, chat, drawn
from tests.store.stores import bindings_over, in_memory, store_over
from tests.waiting import until

ACME, UMBRA = "acme-0123456789abcdef", "umbra-0123456789abcdef"
CHAT, GENERATE = "/v1/chat/completions", "/inference/v1/generate"
RENDER, CLIPS = f"{CHAT}/render", ("/v1/audio/transcriptions", "/v1/audio/translations")
CLIP = wav_of(np.zeros(1_600, np.float32), 16_000)
KEYS = Keyring([("acme", ACME), ("umbra", UMBRA)])
NAME = "acme-s-screen"
FILE_FORM: Mapping[str, Any] = {"files": {"file": ("a.png", b"pixels")}, "data": {"purpose": "vision"}}

_VOLATILE = re.compile(
    r"(chatcmpl|cmpl|generate-tokens|transcribe)-[0-9a-z-]+|(resp|msg|rs|fc)_[0-9a-z_]+|\"created(_at)?\":\s*\d+"
)


@dataclass
class World:
    """A frontend with two tenants, and what it has done."""

    app: Rig
    processed: list[Any]

    async def ask(self, key: str, method: str, path: str, **request: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}", **request.pop("headers", {})}
        return await self.app.client.request(method, path, headers=headers, **request)

    def work(self) -> Mapping[str, float]:
        """What has been done, in numbers that only grow."""
        names = (
            *("semel_mm_cache", "semel_features_sent", "semel_feature_bytes"),
            *("semel_features_repaired", "semel_media_store", "semel_stored_responses"),
        )
        samples = self.app.metrics("semel_").items()
        counted = {
            name: float(value)
            for name, value in samples
            if name.startswith(names) and name.partition("{")[0].endswith("_total")
        }
        return {**counted, "processed": len(self.processed), "submitted": self.app.engine.submissions}


@dataclass(frozen=True)
class View:
    """What a tenant can tell of one request: the answer, and by the time that it took, the work."""

    status: int
    headers: tuple[tuple[str, str], ...]
    text: str
    work: tuple[tuple[str, float], ...]
    looked_up: int
    shares_prefix: bool


@dataclass(frozen=True)
class Loot:
    """All that acme was told and has sent, but for its key, in umbra's hands."""

    rendered: Mapping[str, Any]
    file: bytes
    packed: Mapping[str, Any]
    file_id: str
    """Of what it has uploaded."""

    media_id: str
    """Of what it has sent, as an answer returned it."""

    response_id: str
    """Of a stored response."""

    answer: Mapping[str, Any]
    """Of what was sent packed: it tells the digests of these bytes, and their tags."""

    @property
    def digest(self) -> str:
        hashes: Sequence[str] = self.rendered["features"]["mm_hashes"]["image"]
        return hashes[0]

    @property
    def unsealed(self) -> bytes:
        """The file without its seals."""
        file = read_file(memoryview(self.file))
        prompt = json.loads(file.texts["generate"])
        del prompt["features"]["mm_seals"]
        features = {entry.digest: entry.feature for entry in file.entries if isinstance(entry, FeatureEntry)}
        return b"".join(write(features, {"generate": json.dumps(prompt)}))


@asynccontextmanager
async def chatting(folder: Path, renderer: ChatRenderer) -> AsyncIterator[World]:
    """A frontend for chats, which knows what an image's tensors look like."""
    drawing = Drawing(renderer, LruCache(64 * FEATURE_BYTES))
    async with rig(folder, drawing.pipeline, engine_bytes=64 * FEATURE_BYTES, keys=KEYS) as made:
        serving = made.service.serving()
        fields: dict[Modality, dict[str, Field]] = {"image": {"pixel_values": Field("uint8", (FEATURE_BYTES,))}}
        made.service.refusals = RefusalLimits(per_s=0)  # or refusals would wait
        made.service.media_store = store = await store_over(in_memory(), key=rigs.KEY)
        made.service.response_records = SealedRecords(await store_over(in_memory(), key=rigs.KEY), rigs.KEY)
        pipeline = replace(
            serving.pipeline, files=FileSources.of(store, await bindings_over(in_memory())), key=rigs.KEY
        )
        made.service.begin(ServedModel(serving.fleet, replace(serving.contract, fields=fields), pipeline))
        made.meter.watch(store.samples)
        yield World(made, drawing.processed)


@asynccontextmanager
async def hearing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """A frontend for clips."""
    processed: list[Any] = []

    async def process(media: Media, options: Mapping[str, object], **_: object) -> Feature:
        processed.append(media.data)
        tensor = Tensor("uint8", (len(media.data),), memoryview(media.data))
        return Feature("audio", {"input_features": tensor}, Layout((0,) * 4))

    monkeypatch.setattr(rigs, "CONTRACT", replace(rigs.CONTRACT, max_items={"audio": 1}))
    pipeline = Pipeline(TOKENIZER, None, process, "heard", Key(bytes(32)), LruCache(1 << 20))
    async with rig(folder, pipeline, engine_bytes=1 << 20, keys=KEYS) as made:
        yield World(made, processed)


def body(number: int, **fields: Any) -> dict[str, Any]:
    return {"messages": list(chat(number).messages), **fields}


def with_parts(changes: Mapping[str, Any]) -> dict[str, Any]:
    """A chat with image 1, whose part is changed."""
    asked = json.loads(json.dumps(body(1)))
    part = asked["messages"][0]["content"][0]
    part.update(changes)
    return {**asked}


def with_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """A chat with this part in the place of its image."""
    made: dict[str, Any] = json.loads(json.dumps(body(1)))
    made["messages"][0]["content"][0] = dict(part)
    return made


def packed(rendered: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A rendered prompt with the tensors of its one image in it, as vLLM gives them."""
    tensor = drawn(Media("image", str(number).encode())).tensors["pixel_values"]
    element: dict[str, object] = {
        "data": (tensor.dtype, tensor.shape, Ext(3, bytes(tensor.data))),
        "field": ("batched", {}),
    }
    data = base64.b64encode(msgspec.msgpack.encode({"pixel_values": element})).decode()
    features = {**rendered["features"], "mm_tags": {}, "mm_hashes": {"image": ["its-name"]}}
    return {**rendered, "features": {**features, "kwargs_data": {"image": [data]}}}


async def busy(world: World, key: str) -> Loot:
    """A tenant uses every route that takes or gives anything of an image, which is injected too; what it learns."""

    async def ok(path: str, **request: Any) -> httpx.Response:
        reply = await world.ask(key, "POST", path, **request)
        assert reply.status_code == 200, reply.text
        return reply

    tensors = {"accept": SAFETENSORS}
    rendered = (await ok(RENDER, json=body(1))).json()
    file = (await ok(RENDER, json=body(1), headers=tensors)).content
    sent = packed(rendered, 1)
    for _ in range(2):
        await ok(CHAT, json=body(1))
        await ok("/tokenize", json=body(1))
        await ok("/v1/completions", json={"prompt": "hello"})
        await ok(GENERATE, content=file, headers={"content-type": SAFETENSORS})
        answer = (await ok(GENERATE, json=sent)).json()
    upload = await ok("/v1/files", **FILE_FORM)
    (media_id,) = (await ok(CHAT, json={**with_parts({"uuid": NAME}), "return_media_ids": True})).json()["media_ids"]
    response_id = (await ok("/v1/responses", json={"input": "hello"})).json()["id"]
    loot = Loot(rendered, file, sent, upload.json()["id"], media_id, response_id, answer)
    await until(lambda: world.app.worker.holding(Digest(bytes.fromhex(loot.digest))) is not None)
    await ok(GENERATE, json=rendered)
    await ok(GENERATE, content=loot.unsealed, headers={"content-type": SAFETENSORS})
    await world.app.engine.inject(Digest(bytes.fromhex(loot.digest)), drawn(Media("image", b"1")))
    return loot


async def view(world: World, monkeypatch: pytest.MonkeyPatch, method: str, path: str, request: Any) -> View:
    """What umbra can tell of a request."""
    before, salts = world.work(), set(world.app.engine.salts)
    submitted = world.app.engine.submissions
    with monkeypatch.context() as patched:
        lookups = _count_lookups(patched)
        request = dict(request)
        reply = await world.ask(UMBRA, method, path.format(**request.pop("path", {})), **request)
    last, after = world.app.engine.last, world.work()
    shares = world.app.engine.submissions > submitted and last is not None and last.cache_salt in salts
    grown = ((name, after[name] - before.get(name, 0.0)) for name in sorted(after))
    return View(
        reply.status_code,
        tuple(sorted((name, value) for name, value in reply.headers.items() if not name.endswith("request-id"))),
        _VOLATILE.sub("_", reply.content.decode(errors="replace")),
        tuple((name, amount) for name, amount in grown if amount),
        len(lookups),
        shares,
    )


def _count_lookups(monkeypatch: pytest.MonkeyPatch) -> list[Digest]:
    """Every digest that is looked up in what a worker holds, and is found: a miss costs the same whoever asks."""
    found: list[Digest] = []
    holding = RemoteWorker.holding

    def counted(self: RemoteWorker, digest: Digest) -> Any:
        found.append(digest)
        return holding(self, digest)

    monkeypatch.setattr(RemoteWorker, "holding", counted)
    return found


def share_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one tenant has stored is there for all."""
    for name in ("read", "write", "delete"):
        call = getattr(SealedRecords, name)
        monkeypatch.setattr(SealedRecords, name, lambda self, _, *rest, call=call: call(self, Tenant(), *rest))


def share_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The naive frontend: what one tenant has sent is there for all."""
    identity = Pipeline._identity

    def shared(self: Pipeline, modality: Modality, options: Mapping[str, object], tenant: Tenant | None) -> Identity:
        del tenant
        return identity(self, modality, options, None)

    monkeypatch.setattr(Pipeline, "_identity", shared)
    memory = MediaNames._memory
    monkeypatch.setattr(MediaNames, "_memory", lambda self, _: memory(self, Tenant()))
    monkeypatch.setattr("semel.store.bindings.owner_name", lambda _, key: owner_name("", key))
    monkeypatch.setattr("semel.store.store.owner_name", lambda _, key: owner_name("", key))
    share_records(monkeypatch)
    monkeypatch.setattr(given, "has_tag", lambda *_: True)
    monkeypatch.setattr(given, "feature_digest", lambda feature, _, key: feature_digest(feature, Tenant(), key))
    monkeypatch.setattr(Tenant, "prefix_salt", property(lambda self: self.salt))
