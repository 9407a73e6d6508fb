"""What is not served is answered with what to use instead, in OpenAI's shape; and the version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from semel.frontend.routes.unsupported import NOT_SUPPORTED, UNSUPPORTED
from tests.frontend.asgi import Exchange, stream_of
from tests.frontend.rig import Rig

VLLM_FRONTDOOR = {
    *("/v1/responses/{response_id}/cancel", "/generative_scoring"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
}


def test_what_vllm_serves_to_clients_and_semel_does_not_is_in_the_table() -> None:
    assert UNSUPPORTED.keys() >= VLLM_FRONTDOOR


@pytest.mark.parametrize("path", UNSUPPORTED)
async def test_a_route_that_is_not_supported_says_so_and_what_to_do(app: Rig, path: str) -> None:
    for method in ("POST", "GET"):
        reply = await app.client.request(method, path.replace("{response_id}", "resp_1"))
        assert reply.status_code == 404
        error = reply.json()["error"]
        if path.startswith("/v1/messages"):
            assert (reply.json()["type"], error["type"]) == ("error", "not_found_error")
        else:
            assert (error["code"], error["type"]) == (NOT_SUPPORTED, "invalid_request_error")
        assert error["message"].startswith(f"{path} is not supported: ")
    assert app.engine.submissions == 0


async def test_nothing_of_a_request_that_is_not_supported_is_read_S18(app: Rig) -> None:
    exchange = Exchange()
    pulled = []

    def endless() -> Iterator[bytes]:
        while True:
            pulled.append(True)
            yield b"x" * 65_536

    await exchange.run(app.app, "/v1/moderations", stream_of(endless()))
    assert (exchange.status, exchange.code, pulled) == (404, NOT_SUPPORTED, [])


async def test_a_wrong_method_and_an_unknown_path_are_answered_in_openai_s_shape(app: Rig) -> None:
    wrong = await app.client.get("/v1/chat/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    unknown = await app.client.post("/v1/nothing", json={})
    assert unknown.status_code == 404
    for reply in (wrong, unknown):
        assert reply.json()["error"].keys() == {"message", "type", "param", "code"}
        assert reply.json()["error"]["code"] == "invalid_request"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/v1/v1/messages", "/v1/v1/messages: no such route; leave one /v1 out of the base URL"),
        ("/v1/v1/files/file-1", "/v1/v1/files/file-1: no such route; leave one /v1 out of the base URL"),
        ("/chat/completions", "/chat/completions: no such route; let the base URL end with /v1"),
        ("/v1/nothing", "/v1/nothing: no such route; GET /openapi.json lists the routes"),
        ("/v1/v1/nothing", "/v1/v1/nothing: no such route; GET /openapi.json lists the routes"),
    ],
)
async def test_an_unknown_path_is_named_with_what_is_wrong_about_the_base_url(app: Rig, path: str, says: str) -> None:
    assert await app.refused(path, {}) == (404, says)


async def test_a_long_path_is_not_repeated_whole_S7(app: Rig) -> None:
    assert len((await app.refused("/" + "x" * 20_000, {}))[1]) < 400


def test_the_documentation_names_every_route_that_is_not_supported() -> None:
    text = (Path(__file__).parents[2] / "docs" / "api" / "routes.md").read_text()
    assert not [path for path in UNSUPPORTED if f"`{path}`" not in text]
