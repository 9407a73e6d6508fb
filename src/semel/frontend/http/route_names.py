"""The route of a request that is answered before or without one: refused keys, and paths that lead nowhere."""

from __future__ import annotations

from typing import Any, Final

from starlette.routing import Match
from starlette.types import Scope

from semel.errors import excerpt

__all__ = ["name_route", "no_such_route"]

_VERSION: Final = "/v1"


def name_route(scope: Scope) -> None:
    """Put the route that a request would have reached into its scope, for metrics and logs."""
    if (route := _route(scope, scope["path"])) is not None:
        scope["route"] = route


def no_such_route(scope: Scope) -> str:
    """Say that a path leads nowhere, and what is wrong with a base URL that has `/v1` once too often or not at all."""
    path = scope["path"]
    remedy = "GET /openapi.json lists the routes"
    if path.startswith(f"{_VERSION}{_VERSION}/") and _route(scope, path.removeprefix(_VERSION)) is not None:
        remedy = "leave one /v1 out of the base URL"
    elif _route(scope, _VERSION + path) is not None:
        remedy = "let the base URL end with /v1"
    return f"{excerpt(path)}: no such route; {remedy}"


def _route(scope: Scope, path: str) -> Any:
    """The first route that takes a path, by any method."""
    routes = getattr(scope.get("app"), "routes", ())
    at_path = {**scope, "path": path}
    return next((route for route in routes if route.matches(at_path)[0] is not Match.NONE), None)
