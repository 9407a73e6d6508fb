"""The routes of files: upload, list, look, read, delete. They need a media store, and no model.

Every byte is on the account of its request before it is stored or read, and stays there until the store has ended, even
if the client has gone (threats S18). Another tenant's file is answered as one that is not there, with the same bytes
and after the same work (S12).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

from blake3 import blake3
from pydantic import TypeAdapter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from semel.aio import run_if_large
from semel.core import Digest
from semel.errors import InvalidRequest, NoMediaStore, NotReady, ServiceError, UnknownMedia, excerpt
from semel.frontend.api.openai.files import (
    MAX_PAGE,
    FileDeleted,
    FileList,
    FileObject,
    FileUpload,
    deleted_file,
    file_list,
    file_object,
    query_of,
    upload_of,
)
from semel.frontend.budget import Account
from semel.frontend.http.body import CLIENT_CLOSED, read_upload, unless_disconnected
from semel.frontend.http.download import Download
from semel.frontend.middleware.authentication import tenant_name
from semel.frontend.routes.openapi import DocumentedRoute, looks, takes
from semel.frontend.service import FrontendState
from semel.store import Upload
from semel.store.names import PURPOSES, parse_id
from semel.store.store import MediaStore
from semel.web.multipart import FORM
from semel.web.openapi import JSON, shape
from semel.web.responses import json_response

__all__ = ["file_routes"]

_PATH: Final = "/v1/files"
_BINARY: Final = "application/octet-stream"
_REFUSED: Final = (InvalidRequest.status, UnknownMedia.status, 413, 429, ServiceError.status, NotReady.status, 504)
_UPLOAD: Final = takes(TypeAdapter(FileUpload), {JSON: shape(FileObject)}, form=FORM)

_Work = Callable[[MediaStore, str, Account], Coroutine[Any, Any, Response]]


def file_routes(service: FrontendState) -> list[DocumentedRoute]:
    """The routes of files."""

    async def upload_file(request: Request) -> Response:
        """Store a file. The same bytes have the same id."""
        return await _serve(request, service, partial(_upload, request, service))

    async def list_files(request: Request) -> Response:
        """List the tenant's files."""
        return await _serve(request, service, partial(_list, request))

    async def retrieve_file(request: Request) -> Response:
        """What is known of a file."""
        return await _serve(request, service, partial(_retrieve, request))

    async def download_file(request: Request) -> Response:
        """The bytes of a file."""
        return await _serve(request, service, partial(_download, request, service))

    async def delete_file(request: Request) -> Response:
        """Delete a file."""
        return await _serve(request, service, partial(_delete, request))

    one, content = f"{_PATH}/{{file_id}}", f"{_PATH}/{{file_id}}/content"
    return [
        DocumentedRoute(_PATH, upload_file, methods=["POST"], operation=_UPLOAD),
        DocumentedRoute(_PATH, list_files, operation=_operation({JSON: shape(FileList)}, *_LIST_PARAMETERS)),
        DocumentedRoute(one, retrieve_file, operation=_operation({JSON: shape(FileObject)}, _FILE_ID)),
        DocumentedRoute(
            one, delete_file, methods=["DELETE"], operation=_operation({JSON: shape(FileDeleted)}, _FILE_ID)
        ),
        DocumentedRoute(
            content, download_file, operation=_operation({_BINARY: {"type": "string", "format": "binary"}}, _FILE_ID)
        ),
    ]


async def _serve(request: Request, service: FrontendState, work: _Work) -> Response:
    """Do the work of a route on an account, until the client disconnects."""
    if (store := service.media_store) is None:
        raise NoMediaStore(f"{_PATH} needs a media store: start the server with --media-store")
    tenant = tenant_name(request.scope)
    account = service.budget.open(tenant)
    try:
        with account.revocable():
            response = await work(store, tenant, account)
    except ClientDisconnect:
        account.close()
        return Response(status_code=CLIENT_CLOSED)
    except BaseException:
        account.close()
        raise
    if not isinstance(response, Download):  # it closes the account itself
        account.close()
    return response


async def _upload(
    request: Request, service: FrontendState, store: MediaStore, tenant: str, account: Account
) -> Response:
    form = await read_upload(request, service.body, account, max_file_bytes=service.max_file_bytes)
    upload, data = upload_of(form), form.files["file"]
    if not data:
        raise InvalidRequest.of("file", "the file is empty: send its bytes")
    file = Upload(
        data=data,
        content=(await run_if_large(partial(blake3, data), len(data))).digest(),
        name=form.file_names["file"],
        purpose=upload.purpose,
        ttl_s=None if upload.expires_after is None else upload.expires_after.seconds,
    )

    async def put() -> Response:
        return json_response(file_object(await store.put(tenant, file, account.pin)))

    return await unless_disconnected(request, put())


async def _list(request: Request, store: MediaStore, tenant: str, _: Account) -> Response:
    query = query_of(request.query_params)
    if query.purpose and query.purpose not in PURPOSES:
        raise InvalidRequest.of("purpose", f"must be one of {', '.join(PURPOSES)}")
    after = None if query.after is None else _parse("after", query.after)
    page = await store.page(
        tenant, limit=min(query.limit, MAX_PAGE), order=query.order, purpose=query.purpose, after=after
    )
    if page is None:
        assert query.after is not None
        raise _unknown("after", query.after)
    return json_response(file_list(page))


async def _retrieve(request: Request, store: MediaStore, tenant: str, _: Account) -> Response:
    text, digest = _named(request)
    if (file := await store.find(tenant, digest)) is None:
        raise _unknown("file_id", text)
    return json_response(file_object(file))


async def _download(
    request: Request, service: FrontendState, store: MediaStore, tenant: str, account: Account
) -> Response:
    text, digest = _named(request)
    if (found := await store.stream(tenant, digest, account.take, account.pin)) is None:
        raise _unknown("file_id", text)
    file, pieces = found
    response = Download(pieces, file.nbytes, account, media_type=_BINARY, within_s=service.body.max_s)
    response.headers["X-Content-Type-Options"] = "nosniff"
    return response


async def _delete(request: Request, store: MediaStore, tenant: str, _: Account) -> Response:
    text, digest = _named(request)
    if not await store.delete(tenant, digest):
        raise _unknown("file_id", text)
    return json_response(deleted_file(text))


def _named(request: Request) -> tuple[str, Digest]:
    text: str = request.path_params["file_id"]
    return text, _parse("file_id", text)


def _parse(param: str, text: str) -> Digest:
    if (digest := parse_id(text)) is None:
        raise _unknown(param, text)
    return digest


def _unknown(param: str, text: str) -> UnknownMedia:
    return UnknownMedia.of(param, f"there is no file {excerpt(repr(excerpt(text)))}; upload it again")


_FILE_ID: Final = {"name": "file_id", "in": "path", "required": True, "schema": {"type": "string"}}
_LIST_PARAMETERS: Final = (
    {"name": "after", "in": "query", "schema": {"type": "string"}, "description": "The last file of the page before."},
    {
        "name": "limit",
        "in": "query",
        "schema": {"type": "integer", "minimum": 1, "maximum": 10_000, "default": 10_000},
        "description": f"Files in a page; there are at most {MAX_PAGE:,}.",
    },
    {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"], "default": "desc"}},
    {"name": "purpose", "in": "query", "schema": {"enum": list(PURPOSES)}},
)


def _operation(answers: dict[str, Any], *parameters: dict[str, Any]) -> dict[str, Any]:
    return {**looks(answers, refused=_REFUSED), "parameters": list(parameters)}
