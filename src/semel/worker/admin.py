"""The admin address of a worker, over HTTP: metrics for every client; injection, reset and RL for the operator.

What changes the worker needs the admin key, which is neither the fleet key nor a client's: what a digest stands for
cannot be checked, so who may inject may decide what other clients' images look like. The key is asked for before
anything else of a request is read, and one body at a time is in memory.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import Any, Final, Literal

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from typing_extensions import TypedDict

from semel.core import MIN_KEY_CHARS, Contract, is_key
from semel.engine import EngineAdapters
from semel.errors import (
    ConfigError,
    EngineDead,
    EngineFailed,
    InvalidRequest,
    MediaTooLarge,
    NotReady,
    SemelError,
    ServiceError,
)
from semel.interchange import injection as outcomes
from semel.interchange import safetensors
from semel.interchange.injection import Outcomes
from semel.telemetry import Meter
from semel.web.errors import error_response, http_error_response
from semel.web.openapi import JSON, TEXT, Codes, Schema, answer, document, refusals, shape, told_codes
from semel.web.responses import Readiness, json_response
from semel.web.server import operator_routes
from semel.worker.adapter_routes import adapter_operations, adapter_routes
from semel.worker.body import read_body
from semel.worker.control_routes import Control, control_operations, control_routes
from semel.worker.injection import Count, Injectable, inject

__all__ = ["MAX_BODY_BYTES", "AdminKey", "Reset", "admin_document", "create_admin_app"]

MAX_BODY_BYTES: Final = 1 << 30

_CLIENT_CLOSED: Final = 499

CONTENT_TYPES: Final = ("application/octet-stream", "application/x-safetensors")

CODES: Final[Codes] = {
    401: {"invalid_admin_key": "No admin key came with the request, or another one."},
    403: {"no_admin_key": "The worker has no admin key, or this came from another host: nothing can be changed here."},
    415: {"unsupported_content_type": "The body is not said to be a safetensors file."},
}
"""The errors that only the admin address has."""

_ERRORS: Final[Codes] = {
    **CODES,
    **told_codes((InvalidRequest, MediaTooLarge, ServiceError, EngineFailed, EngineDead, NotReady)),
}
_KEY: Final = "The key of the worker's --admin-key-file."

logger = logging.getLogger(__name__)
_audit_log = logging.getLogger("semel.audit")


class Reset(TypedDict):
    """The caches are empty."""

    reset: Literal[True]


def admin_document(*, has_control: bool = False, has_adapters: bool = False) -> dict[str, Any]:
    """Return what can be asked for, and what is answered; with vLLM's routes for RL and adapters if they are served."""
    file: Schema = {"type": "string", "format": "binary"}
    body = {"required": True, "content": {kind: {"schema": file} for kind in CONTENT_TYPES}}
    guarded = _ERRORS.keys() - {400, 413, 415}
    paths = {
        "/health": {"get": _operation("Whether the process is alive.", {})},
        "/ready": {"get": _readiness()},
        "/metrics": {"get": _operation("Counters for Prometheus.", {TEXT: {"type": "string"}})},
        "/v1/mm_cache/contract": {
            "get": _operation("What features the engine takes.", {JSON: shape(Contract)}, guarded)
        },
        "/v1/mm_cache/inject": {
            "post": {
                **_operation("Hold features under digests.", {JSON: shape(Outcomes)}, _ERRORS),
                "requestBody": body,
            }
        },
        "/v1/mm_cache/reset": {"post": _operation("Forget all features.", {JSON: shape(Reset)}, guarded)},
        **(control_operations() if has_control else {}),
        **(adapter_operations() if has_adapters else {}),
    }
    return document("semel worker", paths, codes=_ERRORS, key=_KEY)


def _readiness() -> dict[str, Any]:
    body = {JSON: shape(Readiness)}
    responses = {"200": answer("Requests are served.", body), "503": answer("Not any more.", body)}
    return {"summary": "Whether requests are served; if not, why.", "responses": responses}


def _operation(summary: str, content: Mapping[str, Schema], refused: Iterable[int] = ()) -> dict[str, Any]:
    statuses = tuple(refused)
    operation = {"summary": summary, "responses": {"200": answer("What was asked for.", content), **refusals(statuses)}}
    return {**operation, "security": [{"key": []}]} if statuses else operation


class AdminKey:
    """The operator's key, which can be replaced while the worker runs. Without one, nothing can be changed."""

    def __init__(self, text: str | None) -> None:
        self._text: str | None = None
        if text is not None:
            self.replace(text)

    def __repr__(self) -> str:
        return f"AdminKey({'set' if self.is_set else 'none'})"

    @property
    def is_set(self) -> bool:
        """True if there is one."""
        return self._text is not None

    def replace(self, text: str) -> None:
        """Take another one from now on, and no longer the one before; a `ConfigError` if it is none."""
        _check_key(text)
        self._text = text

    def matches(self, presented: str) -> bool:
        """Return whether this is it; how long that takes does not tell how much of it was right."""
        return self._text is not None and hmac.compare_digest(presented.encode(), self._text.encode())


def create_admin_app(
    engine: Injectable,
    meter: Meter,
    *,
    key: AdminKey | str | None,
    count: Count,
    reset: Callable[[], Awaitable[None]],
    reason: Callable[[], str] = str,
    control: Control | None = None,
    adapters: EngineAdapters | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    idle_s: float = 30.0,
    turn_s: float = 60.0,
) -> Starlette:
    """Return the HTTP application. Without a `key` nothing can be changed through it; `reset` clears both sides (D5).

    `reason` says why the worker takes no requests, and nothing if it does. With a `control` vLLM's routes for RL are
    served, with `adapters` those that load and unload them. A client that does not come over loopback
    finds metrics and probes, and nothing else: features and the key do not go over a network in the clear. A body may
    pause for `idle_s`, and a request that comes while another body is taken in waits for `turn_s`.
    """
    key = key if isinstance(key, AdminKey) else AdminKey(key)
    intake = _Intake(engine, count, max_body_bytes, idle_s, turn_s)

    async def tell_contract(_: Request) -> Response:
        return Response(msgspec.json.encode(engine.contract), media_type="application/json")

    async def reset_caches(_: Request) -> Response:
        await reset()
        done: Reset = {"reset": True}
        return json_response(done)

    async def tell_routes(request: Request) -> Response:
        _check_loopback(request)
        return json_response(admin_document(has_control=control is not None, has_adapters=adapters is not None))

    def guarded(action: str, handler: Callable[[Request], Awaitable[Response]]) -> Any:
        return _guarded(action, key, handler)

    return Starlette(
        routes=[
            *operator_routes(meter, reason),
            Route("/openapi.json", tell_routes),
            Route("/v1/mm_cache/contract", guarded("contract", tell_contract), methods=["GET"]),
            Route("/v1/mm_cache/inject", guarded("inject", intake.inject), methods=["POST"]),
            Route("/v1/mm_cache/reset", guarded("reset", reset_caches), methods=["POST"]),
            *(() if control is None else control_routes(control, guarded)),
            *(() if adapters is None else adapter_routes(adapters, guarded)),
        ],
        exception_handlers={SemelError: _on_error, HTTPException: _on_http_error, Exception: _on_surprise},
    )


def _guarded(
    action: str, key: AdminKey, handler: Callable[[Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    """Guard a route for the operator alone. Every call leaves an audit line, also one that is refused or fails."""

    async def call(request: Request) -> Response:
        who, result = "nobody", "failed"
        try:
            _check_loopback(request)
            _authorise(request, key)
            who = "the admin key"
            response = await handler(request)
            result = str(response.status_code)
        except HTTPException as error:
            result = f"refused {error.status_code}"
            raise
        except SemelError as error:
            result = f"refused {type(error).__name__}"
            raise
        else:
            return response
        finally:
            _audit(action, who=who, peer=_peer(request), result=result)

    return call


def _audit(action: str, *, who: str, peer: str, result: str) -> None:
    """Log who did what, from where, and the result, in the audit log. A key is never in it."""
    fields = {"action": action, "who": who, "peer": peer, "result": result}
    _audit_log.info("%s by %s from %s: %s", action, who, peer, result, extra={"fields": fields})


class _Intake:
    """Intake of bodies, one at a time: the next request waits before its body is read."""

    def __init__(self, engine: Injectable, count: Count, max_body_bytes: int, idle_s: float, turn_s: float) -> None:
        self._engine = engine
        self._count = count
        self._max_body_bytes = max_body_bytes
        self._idle_s = idle_s
        self._turn_s = turn_s
        self._turn = asyncio.Lock()

    async def inject(self, request: Request) -> Response:
        _check_content_type(request)
        async with self._one_at_a_time():
            try:
                body = await read_body(request, self._max_body_bytes, self._idle_s, "send the features in several")
            except ClientDisconnect:
                logger.info("%s went away while it injected", _peer(request))
                return Response(status_code=_CLIENT_CLOSED)
            entries = await asyncio.to_thread(safetensors.read, memoryview(body))
            result = await inject(self._engine, entries, self._count, peer=_peer(request))
        return Response(outcomes.encode(result), media_type="application/json")

    @asynccontextmanager
    async def _one_at_a_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._turn_s):
                await self._turn.acquire()
        except TimeoutError:
            raise NotReady("another injection is being taken in; try again") from None
        try:
            yield
        finally:
            self._turn.release()


def _check_key(key: str) -> None:
    if not is_key(key):
        raise ConfigError(f"an admin key has at least {MIN_KEY_CHARS} printable ASCII characters and no blank")


def _check_loopback(request: Request) -> None:
    """Refuse who comes from elsewhere. A client's address can be forged by a header, that of our socket cannot."""
    ends = (request.scope.get("client"), request.scope.get("server"))
    if not all(end is not None and _is_loopback(end[0]) for end in ends):
        raise HTTPException(403, "this is served on 127.0.0.1 of the worker's host only")


def _is_loopback(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _authorise(request: Request, key: AdminKey) -> None:
    """Let the operator pass."""
    if not key.is_set:
        raise HTTPException(403, "this worker has no admin key; start it with --admin-key-file to inject and reset")
    scheme, _, presented = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.matches(presented):
        message = "this needs `Authorization: Bearer KEY` with the key of the worker's --admin-key-file"
        raise HTTPException(401, message, {"WWW-Authenticate": "Bearer"})


def _check_content_type(request: Request) -> None:
    presented = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if presented not in CONTENT_TYPES:
        raise HTTPException(415, f"the content type of a safetensors file is {' or '.join(CONTENT_TYPES)}")


def _peer(request: Request) -> str:
    return "a local process" if request.client is None else f"{request.client.host}:{request.client.port}"


async def _on_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, SemelError)
    return error_response(error, process="worker")


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return http_error_response(error, code=next(iter(CODES.get(error.status_code, ())), "invalid_request"))


async def _on_surprise(_: Request, error: Exception) -> Response:
    logger.error("an admin request failed in a way that we do not expect", exc_info=error)
    return error_response(ServiceError("internal error; the worker's log says more"))
