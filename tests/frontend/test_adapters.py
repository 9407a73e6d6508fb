"""LoRA adapters by their names: listed, asked for through every API, loaded and unloaded by the operator."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from semel.core import Keyring
from semel.errors import ConfigError
from semel.settings.frontend import ApiKeySettings
from semel.telemetry import Meter
from semel.worker.admin import create_admin_app
from tests.frontend.rig import Rig, rig
from tests.render.drawn import Drawing
from tests.waiting import until
from tests.worker.adapting import AdaptingEngine

KEY = "an-operator-s-key-0123456789"
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
APIS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 4},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "hello", "store": False},
    "/v1/messages": CHAT,
    "/inference/v1/generate": {"token_ids": [1, 1, 1], "sampling_params": {"max_tokens": 4}},
}


@pytest.fixture
async def app(tmp_path: Path, drawing: Drawing) -> AsyncIterator[Rig]:
    async with rig(tmp_path, drawing.pipeline, make_engine=AdaptingEngine) as made:
        yield made


@pytest.fixture
async def operator(app: Rig) -> AsyncIterator[httpx.AsyncClient]:
    engine: Any = app.engine
    admin = create_admin_app(engine, Meter(), key=KEY, count=lambda *_: None, reset=app.engine.reset, adapters=engine)
    bearer = {"Authorization": f"Bearer {KEY}"}
    transport = httpx.ASGITransport(admin, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=bearer) as client:
        yield client


async def listed(app: Rig) -> dict[str, dict[str, Any]]:
    return {one["id"]: one for one in (await app.client.get("/v1/models")).json()["data"]}


def answering(app: Rig) -> str | None:
    """The adapter of the latest submission."""
    assert app.engine.last is not None
    return app.engine.last.adapter


@pytest.mark.parametrize("path", APIS)
async def test_an_adapter_is_a_model_of_every_api_and_other_names_are_404(app: Rig, path: str) -> None:
    for name, adapter in (("sql", "sql"), ("tiny", None), ("sql", "sql")):
        answer = await app.ok(path, {**APIS[path], "model": name})
        assert (answer["model"], answering(app)) == (name, adapter)
    response = await app.post(path, {**APIS[path], "model": "sqlite"})
    assert (response.status_code, "'sql' are" in response.text) == (404, True)


async def test_adapters_are_listed_as_vllm_lists_them(app: Rig) -> None:
    models = await listed(app)
    assert list(models) == ["tiny", "sql"]
    assert (models["sql"]["root"], models["sql"]["parent"]) == ("/adapters/sql", "tiny")
    assert not {"root", "parent"} & models["tiny"].keys()


@pytest.mark.parametrize("path", APIS)
async def test_for_other_tenants_an_adapter_is_not_there_S12(tmp_path: Path, drawing: Drawing, path: str) -> None:
    """Byte for byte the answer to a name that nobody has."""
    keys = {"acme": "a" * 32, "beta": "b" * 32}
    async with rig(tmp_path, drawing.pipeline, make_engine=AdaptingEngine, keys=Keyring(list(keys.items()))) as app:
        app.service.adapter_tenants = {"sql": frozenset({"acme"})}

        async def asked(tenant: str, name: str) -> httpx.Response:
            return await app.post(path, {**APIS[path], "model": name}, Authorization=f"Bearer {keys[tenant]}")

        assert (await asked("acme", "sql")).status_code == 200
        refused, unknown = await asked("beta", "sql"), await asked("beta", "lqs")
        assert (refused.status_code, refused.text) == (404, unknown.text.replace("lqs", "sql"))
        models = {
            tenant: (await app.client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})).json()["data"]
            for tenant, key in keys.items()
        }
        assert [one["id"] for one in models["beta"]] == ["tiny"]
        assert [one["id"] for one in models["acme"]] == ["tiny", "sql"]
        app.service.adapter_tenants = {}
        assert (await asked("beta", "sql")).status_code == 200, "the control"


def test_the_tenants_of_adapters_are_named_in_words() -> None:
    settings = ApiKeySettings(adapter_tenants=("sql=acme, beta", "law=acme"))
    assert settings.tenants_by_adapter() == {"sql": {"acme", "beta"}, "law": {"acme"}}
    for wrong in (("sql",), ("=acme",), ("sql=",), ("sql=acme,",), ("sql=acme", "sql=beta")):
        with pytest.raises(ConfigError, match="write ADAPTER=TENANT,TENANT, each adapter once"):
            ApiKeySettings(adapter_tenants=wrong).tenants_by_adapter()


async def test_what_an_operator_loads_and_unloads_frontends_serve_from_then_on(
    app: Rig, operator: httpx.AsyncClient
) -> None:
    body = {"lora_name": "law", "lora_path": "/adapters/law"}
    done = await operator.post("/v1/load_lora_adapter", json=body)
    assert (done.status_code, done.text) == (200, "Success: LoRA adapter 'law' added successfully.")
    await until(lambda: "law" in app.service.serving().fleet.adapters)
    assert list(await listed(app)) == ["tiny", "sql", "law"]
    assert (await app.ok("/v1/chat/completions", {**CHAT, "model": "law"}))["model"] == "law"
    before = app.service.serving().fleet.adapters["law"].content
    await operator.post("/v1/load_lora_adapter", json={**body, "lora_path": "/adapters/law-2", "load_inplace": True})
    await until(lambda: app.service.serving().fleet.adapters["law"].content != before)
    done = await operator.post("/v1/unload_lora_adapter", json={"lora_name": "law"})
    assert (done.status_code, done.text) == (200, "Success: LoRA adapter 'law' removed successfully.")
    await until(lambda: "law" not in app.service.serving().fleet.adapters)
    assert (await app.refused("/v1/chat/completions", {**CHAT, "model": "law"}))[0] == 404


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"lora_name": "law"}, 400),
        ({"lora_name": "law", "lora_path": 5}, 400),
        ({"lora_name": "law", "lora_path": "/nowhere"}, 404),
    ],
)
async def test_what_cannot_be_loaded_is_refused_and_nobody_without_the_key_is_heard_S34(
    operator: httpx.AsyncClient, body: dict[str, Any], status: int
) -> None:
    assert (await operator.post("/v1/load_lora_adapter", json=body)).status_code == status
    stranger = {"Authorization": "Bearer another-key-0123456789"}
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert (await operator.post(path, json=body, headers=stranger)).status_code == 401
