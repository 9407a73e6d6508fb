"""The routes of vLLM's server for RL (`VLLM_SERVER_DEV_MODE=1`), at a worker's admin address: its paths and shapes.

A request without a body means the same as one with `{}`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from semel.engine import EngineControl
from semel.engine.protocol import PauseMode, WeightUpdate
from semel.errors import EngineFailed, InvalidRequest, MediaTooLarge, ServiceError
from semel.web.openapi import JSON, Codes, answer, refusals, shape, told_codes
from semel.web.responses import json_response
from semel.worker.body import read_body
from semel.worker.control_answers import (
    Aborted,
    Asleep,
    Awake,
    Checksums,
    Compared,
    Message,
    Paused,
    Results,
    Size,
    Sleeping,
    State,
    Success,
    Versioned,
    Weights,
)

__all__ = ["CONTROL_ERRORS", "Control", "control_operations", "control_routes"]

MAX_BODY_BYTES: Final = 64 << 20
"""The names and forms of a large model's parameters take a few megabytes, IPC handles more."""

_IDLE_S: Final = 30.0
_SMALL_BODY_BYTES: Final = 1 << 16
"""Up to here a body is decoded on the event loop, in under a millisecond."""

_MAX_LEVEL: Final = 2

CONTROL_ERRORS: Final[Codes] = told_codes((InvalidRequest, MediaTooLarge, ServiceError, EngineFailed))

_ENDS: Final[Mapping[WeightUpdate, str]] = {
    "init_weight_transfer_engine": "Weight transfer initialized",
    "shutdown_weight_transfer_engine": "Weight transfer shut down",
    "start_weight_update": "Weight update started",
    "start_draft_weight_update": "Draft weight update started",
    "update_weights": "Weights updated",
    "finish_weight_update": "Weight update finished",
}
"""What is answered, in vLLM's words."""

_BODIES: Final[Mapping[WeightUpdate, tuple[str, bool]]] = {
    "init_weight_transfer_engine": ("init_info", True),
    "update_weights": ("update_info", True),
    "finish_weight_update": ("weight_version", False),
}
"""The field of the body, and whether it has to be there."""


class Control(Protocol):
    """A worker's engine as its operator controls it: `semel.worker.control.WorkerControl`."""

    @property
    def engine(self) -> EngineControl:
        """The engine."""
        ...

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Pause the engine."""
        ...

    async def resume(self) -> None:
        """Let the engine go on."""
        ...

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Let the engine sleep."""
        ...

    async def wake_up(self, tags: list[str] | None) -> bool:
        """Wake it up; returns whether it goes on."""
        ...

    async def update_weights(self, step: WeightUpdate, info: Any = None) -> None:
        """Do a step of a transfer of weights."""
        ...

    async def collective_rpc(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], timeout_s: float | None
    ) -> list[Any]:
        """Call an allowed method of all worker processes."""
        ...

    async def abort_requests(self, request_ids: list[str]) -> int:
        """End these requests, or all of them if none is named. Returns their number."""
        ...


Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class _Operation:
    method: Literal["GET", "POST"]
    summary: str
    returns: tuple[Any, ...]
    """The types of its answers; none for an empty one."""


_OPERATIONS: Final[Mapping[str, _Operation]] = {
    "pause": _Operation("POST", "Pause the engine.", (State,)),
    "resume": _Operation("POST", "Let the engine go on.", (State,)),
    "is_paused": _Operation("GET", "Whether the engine is paused.", (Paused,)),
    "abort_requests": _Operation("POST", "End requests.", (Aborted,)),
    "sleep": _Operation("POST", "Let the engine sleep.", (Asleep,)),
    "wake_up": _Operation("POST", "Wake the engine up.", (Awake,)),
    "is_sleeping": _Operation("GET", "Whether the engine sleeps.", (Sleeping,)),
    "release_kv_cache_memory": _Operation("POST", "Give the memory of the KV cache back.", (State,)),
    "collective_rpc": _Operation("POST", "Call an allowed method of all worker processes.", (Results,)),
    **{step: _Operation("POST", f"{message}.", (Message,)) for step, message in _ENDS.items()},
    "update_weight_version": _Operation("POST", "Name the weights.", (Versioned,)),
    "weight_info": _Operation("GET", "The name of the weights.", (Weights,)),
    "weight_checker": _Operation("POST", "Checksum, compare or reset the weights.", (Checksums, Compared, State)),
    "get_world_size": _Operation("GET", "The number of worker processes.", (Size,)),
    "reset_prefix_cache": _Operation("POST", "Forget prefixes.", (Success,)),
    "reset_mm_cache": _Operation("POST", "Forget features in the engine.", ()),
    "reset_encoder_cache": _Operation("POST", "Forget encoder outputs, and prefixes with them.", ()),
}


def control_operations() -> dict[str, dict[str, Any]]:
    """Return the routes for the OpenAPI document. Bodies are as vLLM describes them."""
    refused = refusals((401, 403, *CONTROL_ERRORS))
    return {
        f"/{name}": {
            operation.method.lower(): {
                "summary": operation.summary,
                "responses": {
                    "200": answer("It is done.", {JSON: shape(*operation.returns)} if operation.returns else {}),
                    **refused,
                },
                "security": [{"key": []}],
            }
        }
        for name, operation in _OPERATIONS.items()
    }


def control_routes(control: Control, guarded: Callable[[str, Handler], Handler]) -> list[Route]:
    """Return the routes; `guarded` lets only the operator pass."""
    handlers = _Handlers(control)
    return [
        Route(f"/{name}", guarded(name, handlers.of(name)), methods=[operation.method])
        for name, operation in _OPERATIONS.items()
    ]


class _Handlers:
    """The handlers of the routes, by their names."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._engine = control.engine

    def of(self, name: str) -> Handler:
        """Return the handler of a route."""
        for step in _ENDS:
            if step == name:
                return self._weights(step)
        handler: Handler = getattr(self, name)
        return handler

    async def pause(self, request: Request) -> Response:
        await self._control.pause(_mode(request), clear_cache=_flag(request, "clear_cache", default=True))
        return _state("paused")

    async def resume(self, _: Request) -> Response:
        await self._control.resume()
        return _state("resumed")

    async def is_paused(self, _: Request) -> Response:
        paused: Paused = {"is_paused": await self._engine.is_paused()}
        return json_response(paused)

    async def abort_requests(self, request: Request) -> Response:
        request_ids = await _field(request, "request_ids", list[str] | None) or []
        aborted: Aborted = {"status": "aborted", "aborted": await self._control.abort_requests(request_ids)}
        return json_response(aborted)

    async def sleep(self, request: Request) -> Response:
        level = request.query_params.get("level", "1")
        if level not in {str(one) for one in range(_MAX_LEVEL + 1)}:
            raise InvalidRequest("level: 0, 1 or 2", param="level")
        await self._control.sleep(int(level), _mode(request))
        asleep: Asleep = {"status": "sleeping", "level": int(level)}
        return json_response(asleep)

    async def wake_up(self, request: Request) -> Response:
        tags = request.query_params.getlist("tags") or None
        awake: Awake = {"status": "awake" if await self._control.wake_up(tags) else "sleeping", "tags": tags}
        return json_response(awake)

    async def is_sleeping(self, _: Request) -> Response:
        sleeping: Sleeping = {"is_sleeping": await self._engine.is_sleeping()}
        return json_response(sleeping)

    async def release_kv_cache_memory(self, _: Request) -> Response:
        await self._engine.release_kv_cache_memory()
        return _state("kv_cache_released")

    async def collective_rpc(self, request: Request) -> Response:
        call = await _body(request)
        method = _typed(call, "method", str)
        args, kwargs = _typed(call, "args", list[object] | None), _typed(call, "kwargs", dict[str, object] | None)
        timeout_s = _typed(call, "timeout", float | None)
        found = await self._control.collective_rpc(method, args or (), kwargs or {}, timeout_s)
        plain: list[object] = [one if one is None or isinstance(one, dict | list) else str(one) for one in found]
        results: Results = {"results": plain}
        return json_response(results)

    async def update_weight_version(self, request: Request) -> Response:
        version = await _field(request, "new_version", str)
        await self._engine.set_weight_version(version)
        versioned: Versioned = {"success": True, "new_version": version}
        return json_response(versioned)

    async def weight_info(self, _: Request) -> Response:
        weights: Weights = {"weight_version": await self._engine.weight_version()}
        return json_response(weights)

    async def weight_checker(self, request: Request) -> Response:
        call = await _body(request)
        action = _typed(call, "action", Literal["checksum", "reset", "compare"])
        baseline = _typed(call, "baseline", dict[str, str] | None)
        if action == "reset":
            await self._control.collective_rpc("reset_weights", (), {}, None)
            return _state("reset")
        if action == "compare" and baseline is None:
            raise InvalidRequest("baseline: the checksums to compare with", param="baseline")
        checksums: dict[str, str] = {}
        for of_process in await self._engine.weight_checksums():
            checksums.update(of_process)
        if action == "checksum" or baseline is None:
            found: Checksums = {"checksums": checksums}
            return json_response(found)
        names = checksums.keys() | baseline.keys()
        mismatches = sorted(name for name in names if checksums.get(name) != baseline.get(name))
        compared: Compared = {"match": not mismatches, "mismatches": mismatches}
        return json_response(compared)

    async def get_world_size(self, request: Request) -> Response:
        include_dp = _flag(request, "include_dp", default=True)
        size: Size = {"world_size": self._engine.world_size(include_dp=include_dp)}
        return json_response(size)

    async def reset_prefix_cache(self, request: Request) -> Response:
        if _flag(request, "reset_running_requests", default=False):
            raise InvalidRequest(
                "reset_running_requests: vLLM 0.32 would die of it with images; leave it out: no later request finds "
                "the prefixes of those that run",
                param="reset_running_requests",
            )
        await self._engine.forget_prefixes(in_connector=_flag(request, "reset_external", default=False))
        done: Success = {"success": True}
        return json_response(done)

    async def reset_mm_cache(self, _: Request) -> Response:
        await self._engine.forget_items()
        return Response(status_code=200)

    async def reset_encoder_cache(self, _: Request) -> Response:
        await self._engine.forget_outputs()
        return Response(status_code=200)

    def _weights(self, step: WeightUpdate) -> Handler:
        async def call(request: Request) -> Response:
            info = None
            if step in _BODIES:
                name, is_required = _BODIES[step]
                kind: Any = str | None
                if is_required:
                    kind = dict[str, object] if step == "init_weight_transfer_engine" else dict | list
                info = await _field(request, name, kind)
            await self._control.update_weights(step, info)
            message: Message = {"message": _ENDS[step]}
            return json_response(message)

        return call


def _state(status: Literal["paused", "resumed", "kv_cache_released", "reset"]) -> Response:
    state: State = {"status": status}
    return json_response(state)


def _mode(request: Request) -> PauseMode:
    presented = request.query_params.get("mode", "abort")
    for mode in get_args(PauseMode):
        if mode == presented:
            return mode  # type: ignore[no-any-return]
    raise InvalidRequest("mode: abort, wait or keep", param="mode")


def _flag(request: Request, name: str, *, default: bool) -> bool:
    presented = request.query_params.get(name)
    if presented is None:
        return default
    if (lower := presented.lower()) not in ("0", "1", "false", "true"):
        raise InvalidRequest(f"{name}: true or false", param=name)
    return lower in ("1", "true")


async def _body(request: Request) -> dict[str, Any]:
    """Return the object in a request's body."""
    content = await read_body(request, MAX_BODY_BYTES, _IDLE_S)
    if not content:
        return {}
    try:
        if len(content) <= _SMALL_BODY_BYTES:
            return msgspec.json.decode(content, type=dict[str, Any])
        return await asyncio.to_thread(msgspec.json.decode, content, type=dict[str, Any])
    except msgspec.DecodeError:
        raise InvalidRequest("the body is not a JSON object") from None


async def _field(request: Request, name: str, kind: Any) -> Any:
    return _typed(await _body(request), name, kind)


def _typed(body: Mapping[str, Any], name: str, kind: Any) -> Any:
    """Return a field of a body, which has to be of this type; None where it may be missing."""
    try:
        return msgspec.convert(body.get(name), kind)
    except msgspec.ValidationError:
        raise InvalidRequest(f"{name}: it is missing, or not what vLLM takes there", param=name) from None
