"""The routes of stored responses: read, delete, list what was answered. They need a media store, and no model.

Another tenant's response is answered as one that is not there, with the same bytes and after the same work (threats
S12). A request names its `cache_salt` in the URL: a response belongs to the tenant with the salt that it was made with.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from semel.core import Tenant
from semel.errors import InvalidRequest, NoMediaStore, NotReady, ServiceError, UnknownResponse, excerpt
from semel.frontend.api.responses.response import Response as ResponseObject
from semel.frontend.api.responses.stored import ItemList, ResponseDeleted, item_page, item_query, unpack
from semel.frontend.budget import Account
from semel.frontend.http.body import charge_values
from semel.frontend.http.download import Download, in_memory
from semel.frontend.middleware.authentication import tenant_name
from semel.frontend.routes.openapi import DocumentedRoute, looks
from semel.frontend.routes.response_store import StoredResponses
from semel.frontend.service import FrontendState
from semel.render.offload import run_if_heavy
from semel.web.openapi import JSON, shape
from semel.web.responses import json_response

__all__ = ["stored_response_routes"]

_PATH: Final = "/v1/responses/{response_id}"
_JSON: Final = "application/json"
_LIGHT: Final = 64 * 1024
_REFUSED: Final = (InvalidRequest.status, UnknownResponse.status, 413, 429, ServiceError.status, NotReady.status, 504)

_Work = Callable[[StoredResponses, Tenant, Account], Coroutine[Any, Any, Response]]


def stored_response_routes(service: FrontendState) -> list[DocumentedRoute]:
    """The routes of stored responses."""

    async def retrieve_response(request: Request) -> Response:
        """A stored response, as it was answered."""
        return await _serve(request, service, partial(_retrieve, request, service))

    async def delete_response(request: Request) -> Response:
        """Delete a stored response. Those that continue it stay, and so do its media, which are files."""
        return await _serve(request, service, partial(_delete, request))

    async def list_input_items(request: Request) -> Response:
        """List all items that a stored response answers, from the beginning of the conversation."""
        return await _serve(request, service, partial(_list, request, service))

    return [
        DocumentedRoute(_PATH, retrieve_response, operation=_operation(ResponseObject)),
        DocumentedRoute(_PATH, delete_response, methods=["DELETE"], operation=_operation(ResponseDeleted)),
        DocumentedRoute(f"{_PATH}/input_items", list_input_items, operation=_operation(ItemList, *_LIST_PARAMETERS)),
    ]


async def _serve(request: Request, service: FrontendState, work: _Work) -> Response:
    """Do the work of a route on an account."""
    if (stored := StoredResponses.of(service)) is None:
        raise NoMediaStore(
            f"{_PATH} needs stored responses: start the server with --media-store and --store-responses, or send the "
            "whole conversation to /v1/responses"
        )
    tenant = Tenant(tenant_name(request.scope), request.query_params.get("cache_salt"))
    account = service.budget.open(tenant.name)
    try:
        with account.revocable():
            response = await work(stored, tenant, account)
    except BaseException:
        account.close()
        raise
    if not isinstance(response, Download):  # it closes the account itself
        account.close()
    return response


async def _retrieve(
    request: Request, service: FrontendState, stored: StoredResponses, tenant: Tenant, account: Account
) -> Response:
    if request.query_params.get("stream", "false") != "false":
        raise InvalidRequest.of("stream", "a stored response comes whole; leave it out")
    answer, _ = unpack(await _record(request, stored, tenant, account))
    return _download(answer, service, account)


async def _list(
    request: Request, service: FrontendState, stored: StoredResponses, tenant: Tenant, account: Account
) -> Response:
    query = item_query(request.query_params)
    _, items = unpack(await _record(request, stored, tenant, account))
    account.take(3 * len(items))  # as bytes, as strings, and as JSON again
    light = len(items) <= _LIGHT
    await charge_values(await run_if_heavy(partial(bytes, items), light=light), service.body, account)
    page = await run_if_heavy(lambda: msgspec.json.encode(item_page(items, query)), light=light)
    return _download(memoryview(page), service, account)


async def _delete(request: Request, stored: StoredResponses, tenant: Tenant, _: Account) -> Response:
    id_: str = request.path_params["response_id"]
    if not await stored.delete(tenant, id_):
        raise _unknown(id_)
    deleted: ResponseDeleted = {"id": id_, "object": "response", "deleted": True}
    return json_response(deleted)


async def _record(request: Request, stored: StoredResponses, tenant: Tenant, account: Account) -> memoryview:
    id_: str = request.path_params["response_id"]
    if (record := await stored.find(tenant, id_, account)) is None:
        raise _unknown(id_)
    return record


def _unknown(id_: str) -> UnknownResponse:
    return UnknownResponse.of("response_id", f"there is no response {excerpt(repr(excerpt(id_)))}")


def _download(body: memoryview, service: FrontendState, account: Account) -> Response:
    """Return a response whose unsent bytes stay charged."""
    return Download(in_memory([body]), len(body), account, media_type=_JSON, within_s=service.body.max_s)


_ID: Final = {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string"}}
_SALT: Final = {
    "name": "cache_salt",
    "in": "query",
    "schema": {"type": "string"},
    "description": "That of the request that was answered, if it had one.",
}
_LIST_PARAMETERS: Final = (
    {"name": "after", "in": "query", "schema": {"type": "string"}, "description": "The last item of the page before."},
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}},
    {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"], "default": "desc"}},
)


def _operation(answer: type, *parameters: dict[str, Any]) -> dict[str, Any]:
    return {**looks({JSON: shape(answer)}, refused=_REFUSED), "parameters": [_ID, _SALT, *parameters]}
