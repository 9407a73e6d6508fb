"""The OpenAPI document of a frontend, made from the descriptions that its routes declare.

A body is described by the type that parses it, a response by the type that its builder returns (`api`), an error by the
tree of errors. The document omits routes that clients cannot use: those of `unsupported`, and with API keys those of
operators.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from semel.errors import InvalidKey, NotReady, SemelError, ServiceError
from semel.frontend.http.errors import MessagesErrorBody, error_shape, messages_error_body
from semel.frontend.middleware.authentication import OPEN, OPERATORS
from semel.web.openapi import JSON, Schema, answer, document, refusals, told_codes
from semel.web.responses import json_response

__all__ = ["DocumentedApp", "DocumentedRoute", "looks", "probes", "takes"]

_REF: Final = "#/components/schemas/{model}"
_REQUEST_ID: Final = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "What the id of the answer ends with, if it is printable and at most 128 characters.",
    "schema": {"type": "string"},
}
_FAMILIES: Final = {"Messages": MessagesErrorBody}
_KEY: Final = "One of the API keys that the operator has given out."


def takes(
    kind: TypeAdapter[Any], answers: Mapping[str, Schema], *, form: str = JSON, named: bool = False, errors: str = ""
) -> dict[str, Any]:
    """The description of a route that takes a body. With `named`, the response has an id; `errors` is the family of
    its errors."""
    operation = looks(answers, refused=told_codes().keys() - {InvalidKey.status}, errors=errors)
    body = {"required": True, "content": {form: {"schema": _body(kind)}}}
    return {**operation, "requestBody": body, **({"parameters": [_REQUEST_ID]} if named else {})}


def looks(
    answers: Mapping[str, Schema], *, refused: Iterable[int] = (ServiceError.status, NotReady.status), errors: str = ""
) -> dict[str, Any]:
    """The description of a route without a body."""
    return {"responses": {"200": answer("What was asked for.", answers), **refusals(refused, errors)}}


def probes(answers: Mapping[int, tuple[str, Mapping[str, Schema]]]) -> dict[str, Any]:
    """The description of a route whose status is the answer."""
    return {"responses": {str(status): answer(meaning, content) for status, (meaning, content) in answers.items()}}


class DocumentedRoute(Route):
    """A route with its OpenAPI description. One without an `operation` is not in the document."""

    def __init__(
        self,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        *,
        methods: Sequence[str] = ("GET",),
        operation: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(path, endpoint, methods=methods, include_in_schema=operation is not None)
        self.methods = set(methods)  # Starlette adds HEAD to GET, which no client of this API sends
        self.operation = operation or {}

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match a request. If the route takes it, it is put into the request's scope, for metrics and logs."""
        match, found = super().matches(scope)
        return match, found if match is Match.NONE else {**found, "route": self}


Refuse = Callable[[Request, Exception], Awaitable[Response]]
"""Makes the response to a request that ended with an error."""


class DocumentedApp(Starlette):
    """An application whose document comes from its routes. `secured`: it needs API keys. `closed`: it refuses fields
    that a request does not have."""

    def __init__(
        self,
        routes: Iterable[DocumentedRoute],
        *,
        secured: bool,
        refuse: Refuse,
        closed: bool = False,
        middleware: Sequence[Middleware] = (),
    ) -> None:
        self._documented = [DocumentedRoute("/openapi.json", self._send_document), *routes]
        # Looked at one by one: those with a body first, and probes last.
        self._ordered = ordered = sorted(self._documented, key=lambda route: "GET" in (route.methods or ()))
        super().__init__(routes=ordered, middleware=middleware)
        self._by_path = {
            (method, route.path): route
            for route in reversed(ordered)
            for method in route.methods or ()
            if not route.param_convertors
        }
        self._secured = secured
        self._closed = closed
        self._refuse = refuse

    def build_middleware_stack(self) -> ASGIApp:
        """Put the middleware around the routes, without Starlette's own, which resumes two coroutines per message.

        Errors that are not expected end in `RequestContextMiddleware`.
        """
        app: ASGIApp = self._dispatch
        for kind, positional, named in reversed(self.user_middleware):
            app = kind(app, *positional, **named)
        return app

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request by its route. One without parameters is looked up; the others are tried one by one."""
        if scope["type"] != "http":
            await self.router(scope, receive, send)
            return
        request = Request(scope, receive)
        route = self._by_path.get((scope["method"], scope["path"])) or self._find(scope)
        try:
            if route is None:  # it is refused or redirected
                await self.router(scope, receive, send)
                return
            scope["route"] = route
            response = await route.endpoint(request)
        except (SemelError, HTTPException) as error:
            response = await self._refuse(request, error)
        await response(scope, receive, send)  # not above: after its start there is no other response

    def _find(self, scope: Scope) -> DocumentedRoute | None:
        """Find the route that takes a request, and put its parameters into the request's scope."""
        for route in self._ordered:
            match, found = route.matches(scope)
            if match is Match.FULL:
                scope.update(found)
                return route
        return None

    @cache  # noqa: B019 there is one application in a process, and its routes do not change
    def openapi(self) -> dict[str, Any]:
        """The document."""
        codes = {status: named for status, named in told_codes().items() if self._secured or status != 401}
        paths: dict[str, dict[str, Any]] = {}
        for path, operations in self._paths():
            if operations:
                paths.setdefault(path, {}).update(operations)
        made = document("semel", paths, codes=codes, key=_KEY if self._secured else None, families=_FAMILIES)
        if self._closed:
            made["components"]["schemas"] = {name: _closed(one) for name, one in made["components"]["schemas"].items()}
        return made

    async def _send_document(self, _: Request) -> Response:
        return json_response(self.openapi())

    def _paths(self) -> Iterable[tuple[str, dict[str, Any]]]:
        for route in self._documented:
            if route.include_in_schema and not (self._secured and route.path in OPERATORS):
                yield route.path, {method.lower(): self._operation(route) for method in sorted(route.methods or ())}

    def _operation(self, route: DocumentedRoute) -> dict[str, Any]:
        operation = dict(route.operation)
        if self._secured and route.path not in OPEN:
            family = "Messages" if error_shape(route.path) is messages_error_body else ""
            responses = {**operation["responses"], **refusals([InvalidKey.status], family)}
            operation |= {"security": [{"key": []}], "responses": responses}
        return {"operationId": route.name, "summary": inspect.cleandoc(route.endpoint.__doc__ or ""), **operation}


def _closed(schema: Schema) -> Schema:
    """The schema of a body that may have unknown fields as one that may not."""
    is_open = "properties" in schema and schema.get("additionalProperties") is True
    return {**schema, "additionalProperties": False} if is_open else schema


class _Untitled(GenerateJsonSchema):
    """Omits the titles of fields, which only repeat their names."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False


@cache  # most of what making an application takes
def _body(kind: TypeAdapter[Any]) -> Schema:
    schema = kind.json_schema(ref_template=_REF, schema_generator=_Untitled)
    if (name := schema.get("title")) is None:
        if "oneOf" in schema:  # a body may fit several, if unknown fields are ignored
            schema["anyOf"] = schema.pop("oneOf")
        return schema
    parts = schema.pop("$defs", {})
    return {"$ref": _REF.format(model=name), "$defs": {**parts, name: schema}}
