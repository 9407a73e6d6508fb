"""The OpenAPI document of a frontend: what its routes take and answer, put together from what they tell beside them.

A body is told by what parses it, an answer by its type (`shapes`), an error by the tree of errors. Routes that nobody
can use are not in it: those of `unsupported`, and with API keys those of operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from semel.errors import InvalidKey, NotReady, ServiceError
from semel.frontend.middleware.authentication import OPEN, OPERATORS
from semel.web.openapi import JSON, Schema, answer, document, refusals, told_codes

__all__ = ["DocumentedApp", "looks", "probes", "takes"]

_REF: Final = "#/components/schemas/{model}"
_REQUEST_ID: Final = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "What the id of the answer ends with, if it is printable and at most 128 characters.",
    "schema": {"type": "string"},
}
_KEY: Final = "One of the API keys that the operator has given out."


def takes(
    kind: TypeAdapter[Any], answers: Mapping[str, Schema], *, form: str = JSON, named: bool = False
) -> dict[str, Any]:
    """What a route tells that takes a body and answers in one of these forms; `named`: the answer has an id."""
    operation = looks(answers, refused=told_codes().keys() - {InvalidKey.status})
    body = {"required": True, "content": {form: {"schema": _body(kind)}}}
    return {**operation, "requestBody": body, **({"parameters": [_REQUEST_ID]} if named else {})}


def looks(
    answers: Mapping[str, Schema], *, refused: Iterable[int] = (ServiceError.status, NotReady.status)
) -> dict[str, Any]:
    """What a route tells that takes no body."""
    return {"responses": {"200": answer("What was asked for.", answers), **refusals(refused)}}


def probes(answers: Mapping[int, tuple[str, Mapping[str, Schema]]]) -> dict[str, Any]:
    """What a route tells whose status is the answer."""
    return {"responses": {str(status): answer(meaning, content) for status, (meaning, content) in answers.items()}}


class DocumentedApp(FastAPI):
    """An application whose document is what its routes tell. `secured`: it needs API keys."""

    def __init__(self, *, secured: bool) -> None:
        super().__init__(title="semel", docs_url=None, redoc_url=None)
        self._secured = secured

    def openapi(self) -> dict[str, Any]:
        """The document, made once: routes do not change."""
        if self.openapi_schema is None:
            codes = {status: operation for status, operation in told_codes().items() if self._secured or status != 401}
            paths = {path: operations for path, operations in self._paths() if operations}
            self.openapi_schema = document("semel", paths, codes=codes, key=_KEY if self._secured else None)
        return self.openapi_schema

    def _paths(self) -> Iterable[tuple[str, dict[str, Any]]]:
        for route in self.routes:
            if not isinstance(route, APIRoute) or not route.include_in_schema:
                continue
            if not (self._secured and route.path in OPERATORS):
                yield route.path, {method.lower(): self._operation(route) for method in sorted(route.methods)}

    def _operation(self, route: APIRoute) -> dict[str, Any]:
        operation = dict(route.openapi_extra or {})
        if self._secured and route.path not in OPEN:
            operation |= {
                "security": [{"key": []}],
                "responses": {**operation["responses"], **refusals([InvalidKey.status])},
            }
        return {"operationId": route.name, "summary": route.description, **operation}


class _Untitled(GenerateJsonSchema):
    """Fields have names; titles made of these say nothing more."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False


def _body(kind: TypeAdapter[Any]) -> Schema:
    schema = kind.json_schema(ref_template=_REF, schema_generator=_Untitled)
    if (name := schema.get("title")) is None:
        return schema
    parts = schema.pop("$defs", {})
    return {"$ref": _REF.format(model=name), "$defs": {**parts, name: schema}}
