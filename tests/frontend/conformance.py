"""A served application, and what schemathesis finds when it calls an operation of its OpenAPI document."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jsonschema_rs
import requests
import schemathesis
import uvicorn
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case, GenerationMode, SerializationContext
from schemathesis.checks import CheckContext, load_all_checks, not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.core.transport import Response
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi import checks
from starlette.types import ASGIApp

from semel.web.listener import bind

SEED = 20_261_115
DEADLINE_S = 60
EVENTS = "text/event-stream"
AnyOperation = APIOperation[Any, Any, Any, Any]
POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE

load_all_checks()


@schemathesis.serializer("application/x-safetensors")
def _as_it_is(_: SerializationContext, value: Any) -> bytes:
    return value if isinstance(value, bytes) else bytes(getattr(value, "data", b""))


_NUMBER = {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": r"^\s*[-+]?[0-9._]+([eE][-+]?[0-9]+)?\s*$"}]}
_BOOLEAN = {"anyOf": [{"enum": [0, 1]}, {"type": "string", "pattern": r"^(?i)(0|1|t|f|y|n|true|false|yes|no|on|off)$"}]}
_SPELLED: Mapping[str, Any] = {"integer": _NUMBER, "number": _NUMBER, "boolean": _BOOLEAN}
"""How numbers and booleans may be written too: vLLM's server reads them so, and ours does. The document does not tell
it, since nobody should write them so."""


@dataclass(frozen=True)
class Served:
    """An application at an address, and how it has answered so far."""

    url: str
    document: dict[str, Any]
    answers: Counter[tuple[str, int, str]] = field(default_factory=Counter)
    """How many, by operation, status and content type."""

    @cached_property
    def operations(self) -> Mapping[str, AnyOperation]:
        """Those of the document, by method and path."""
        schema = schemathesis.openapi.from_dict(self.document)
        schema.config.max_stream_events = 1_000_000  # it reads 20 of a stream's events
        return {one.ok().label: one.ok() for one in schema.get_all_operations() if isinstance(one, Ok)}

    def examine(
        self,
        label: str,
        mode: GenerationMode,
        *,
        count: int,
        headers: Mapping[str, str] | None = None,
        change: Callable[[Case[Any]], None] = lambda _: None,
    ) -> None:
        """Call an operation so often, with data of this mode, and check every answer."""
        operation = self.operations[label]

        @seed(SEED)
        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def call(case: Case[Any]) -> None:
            change(case)
            self._call(session, case, mode, headers)

        with requests.Session() as session:
            call()

    def cover(self, label: str, *, change: Callable[[Case[Any]], None] = lambda _: None) -> None:
        """Call an operation at and beyond each bound of its schemas, without chance."""
        operation = self.operations[label]
        config = operation.schema.config.generation_for(operation=operation)
        modes = [POSITIVE, NEGATIVE]
        with requests.Session() as session:
            for case in operation.schema.iter_coverage_cases(
                operation, generation_modes=modes, generation_config=config
            ):
                change(case)
                assert case.meta is not None
                self._call(session, case, case.meta.generation.mode, None)

    def _call(
        self, session: requests.Session, case: Case[Any], mode: GenerationMode, headers: Mapping[str, str] | None
    ) -> None:
        response = case.call(base_url=self.url, session=session, headers=dict(headers or {}), timeout=DEADLINE_S)
        content_type = response.headers.get("content-type", [""])[0].partition(";")[0]
        self.answers[case.operation.label, response.status_code, content_type] += 1
        checked = [*_CHECKS, _events_conform]
        case.validate_response(response, checks=[*checked, _refused] if mode is NEGATIVE else checked)


@contextmanager
def served(
    entered: Callable[[], AbstractAsyncContextManager[ASGIApp]], headers: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """The application that is there while a context is entered, under uvicorn in a thread with a loop of its own."""
    bound = bind("127.0.0.1", 0)
    bound.listen()
    ready = threading.Event()
    servers: list[uvicorn.Server] = []

    async def run() -> None:
        try:
            async with entered() as app:
                config = uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=2)
                servers.append(uvicorn.Server(config))
                ready.set()
                await servers[0].serve([bound])
        finally:
            ready.set()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert ready.wait(DEADLINE_S)
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        document = requests.get(f"{url}/openapi.json", headers=dict(headers or {}), timeout=DEADLINE_S).json()
        yield Served(url, document)
    finally:
        for server in servers:
            server.should_exit = True
        thread.join(DEADLINE_S)
        bound.close()
        assert not thread.is_alive()


def validator(document: Mapping[str, Any], schema: Mapping[str, Any]) -> jsonschema_rs.Validator:
    """What a schema of a document accepts."""
    return jsonschema_rs.Draft202012Validator({**schema, "components": document["components"]})


_COMPILED: dict[tuple[str, str], jsonschema_rs.Validator] = {}


def _compiled(kind: str, case: Case[Any], schema: Callable[[], tuple[Any, Any]]) -> jsonschema_rs.Validator:
    """The validator of a schema of an operation's document, compiled once: with all components, it takes 50 ms."""
    key = kind, case.operation.label
    if key not in _COMPILED:
        _COMPILED[key] = validator(*schema())
    return _COMPILED[key]


def _events_conform(_: CheckContext, response: Response, case: Case[Any]) -> None:
    """Each event of a stream is what the document says; schemathesis does not look into their data."""
    if not response.headers.get("content-type", [""])[0].startswith(EVENTS):
        return
    document: Mapping[str, Any] = case.operation.schema.raw_schema
    told = document["paths"][case.operation.path][case.operation.method]["responses"]["200"]["content"][EVENTS]
    if "event" in told["itemSchema"]["properties"]:
        properties = told["itemSchema"]["properties"]
        accepts = _compiled("events", case, lambda: (document, properties["data"]["contentSchema"]))
        _named_events_conform(accepts, properties["event"]["enum"], response.content.decode())
        return
    done, data = told["itemSchema"]["properties"]["data"]["anyOf"]
    *events, last, rest = response.content.decode().split("\n\n")
    assert (last, rest) == (f"data: {done['const']}", "")
    accepts = _compiled("events", case, lambda: (document, data["contentSchema"]))
    for event in events:
        accepts.validate(json.loads(event.removeprefix("data: ")))


def _named_events_conform(accepts: jsonschema_rs.Validator, names: Sequence[str], content: str) -> None:
    *events, rest = content.split("\n\n")
    assert events
    assert not rest
    for event in events:
        name, data = event.split("\n")
        body = json.loads(data.removeprefix("data: "))
        accepts.validate(body)
        assert name == f"event: {body['type']}"
        assert body["type"] in names


def _refused(context: CheckContext, response: Response, case: Case[Any]) -> None:
    """What breaks the schema is refused, but for numbers and booleans that are only written otherwise."""
    if response.status_code < 400 and not _is_only_spelled_otherwise(case):
        checks.negative_data_rejection(context, response, case)


def _is_only_spelled_otherwise(case: Case[Any]) -> bool:
    document: Mapping[str, Any] = case.operation.schema.raw_schema
    told = document["paths"][case.operation.path][case.operation.method]["requestBody"]["content"]
    schema = told.get("application/json", {}).get("schema")
    if schema is None or not isinstance(case.body, dict):
        return False
    return _compiled("lenient", case, lambda: (_lenient(document), _lenient(schema))).is_valid(case.body)


def _lenient(value: Any) -> Any:
    if isinstance(value, list):
        return [_lenient(one) for one in value]
    if not isinstance(value, dict):
        return value
    changed = {name: _lenient(one) for name, one in value.items()}
    if isinstance(kind := value.get("type"), str) and kind in _SPELLED:
        return {"anyOf": [changed, _SPELLED[kind]]}
    return changed


_CHECKS = (
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
)
