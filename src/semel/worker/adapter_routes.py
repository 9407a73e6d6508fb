"""vLLM's routes to load and unload LoRA adapters, at a worker's admin address: its paths and shapes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from semel.engine import EngineAdapters
from semel.errors import EngineFailed, InvalidRequest, MediaTooLarge, ModelNotFound
from semel.web.openapi import TEXT, Codes, answer, refusals, told_codes
from semel.worker.body import read_body

__all__ = ["ADAPTER_ERRORS", "adapter_operations", "adapter_routes"]

_MAX_BODY_BYTES: Final = 1 << 16
_IDLE_S: Final = 30.0

ADAPTER_ERRORS: Final[Codes] = told_codes((InvalidRequest, ModelNotFound, MediaTooLarge, EngineFailed))

_LOAD: Final = "/v1/load_lora_adapter"
_UNLOAD: Final = "/v1/unload_lora_adapter"

Handler = Callable[[Request], Awaitable[Response]]


class _Load(msgspec.Struct):
    lora_name: str
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class _Unload(msgspec.Struct):
    lora_name: str


def adapter_operations() -> dict[str, dict[str, Any]]:
    """Return the routes for the OpenAPI document. Bodies are as vLLM describes them."""
    refused = refusals((401, 403, *ADAPTER_ERRORS))
    done = {"200": answer("It is done.", {TEXT: {"type": "string"}}), **refused}
    summaries = {_LOAD: "Load a LoRA adapter.", _UNLOAD: "Unload a LoRA adapter."}
    return {
        path: {"post": {"summary": summary, "responses": done, "security": [{"key": []}]}}
        for path, summary in summaries.items()
    }


def adapter_routes(adapters: EngineAdapters, guarded: Callable[[str, Handler], Handler]) -> list[Route]:
    """Return the routes; `guarded` lets only the operator pass."""

    async def load(request: Request) -> Response:
        body = await _body(request, _Load)
        await adapters.load(
            body.lora_name, body.lora_path, in_place=body.load_inplace, is_3d_weight=body.is_3d_lora_weight
        )
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(request: Request) -> Response:
        body = await _body(request, _Unload)
        await adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    routes = {_LOAD: ("load_lora_adapter", load), _UNLOAD: ("unload_lora_adapter", unload)}
    return [Route(path, guarded(name, handler), methods=["POST"]) for path, (name, handler) in routes.items()]


async def _body(request: Request, kind: Any) -> Any:
    content = await read_body(request, _MAX_BODY_BYTES, _IDLE_S)
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError:
        fields = ", ".join(kind.__struct_fields__)
        raise InvalidRequest(f"the body is not what vLLM takes there: a JSON object with {fields}") from None
