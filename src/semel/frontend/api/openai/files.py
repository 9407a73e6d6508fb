"""Files in OpenAI's shapes: what an upload says, and what is told of a file. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from semel.errors import InvalidRequest
from semel.frontend.api.shared.faults import fault_of
from semel.store import Page, StoredFile
from semel.store.names import public_id
from semel.web.multipart import Form

__all__ = [
    "MAX_PAGE",
    "ExpiresAfter",
    "FileDeleted",
    "FileList",
    "FileObject",
    "FileQuery",
    "FileUpload",
    "deleted_file",
    "file_list",
    "file_object",
    "query_of",
    "upload_of",
]

MAX_PAGE: Final = 1_000
"""Files in one page, whatever a client wants: with more, a page would keep other requests waiting."""

_MIN_TTL_S, _MAX_TTL_S = 3_600, 2_592_000
_EXPIRY: Final = ("anchor", "seconds")

Purpose = Literal["assistants", "batch", "evals", "fine-tune", "user_data", "vision"]


class ExpiresAfter(BaseModel):
    """How long a file is to be kept."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=_MIN_TTL_S, le=_MAX_TTL_S)]


class FileUpload(BaseModel):
    """A file, and what it is for. A form writes the two fields of `expires_after` as `expires_after[seconds]`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: bytes
    purpose: Purpose
    expires_after: ExpiresAfter | None = None


class FileQuery(BaseModel):
    """Which files to list."""

    model_config = ConfigDict(frozen=True)

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    purpose: str = ""


class FileObject(TypedDict):
    """A file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"]


class FileList(TypedDict):
    """Some files of a tenant."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(TypedDict):
    """A file that is gone."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


_T = TypeVar("_T")
_UPLOAD: Final = TypeAdapter(FileUpload)
_QUERY: Final = TypeAdapter(FileQuery)


def upload_of(form: Form) -> FileUpload:
    """What a form says of its file, whose bytes stay in the form."""
    if form.files.keys() != {"file"}:
        raise InvalidRequest.of("file", "the form needs one file, in the field file")
    fields: dict[str, Any] = dict(form.fields)
    expiry = {name: value for name in _EXPIRY if (value := fields.pop(f"expires_after[{name}]", None)) is not None}
    if expiry:
        fields["expires_after"] = expiry
    return _validated(_UPLOAD, {**fields, "file": b""})


def query_of(parameters: Mapping[str, str]) -> FileQuery:
    """Which files the parameters of a URL want to have listed."""
    return _validated(_QUERY, dict(parameters))


def file_object(file: StoredFile) -> FileObject:
    """What is told of a file."""
    return {
        "id": public_id(file.id),
        "object": "file",
        "bytes": file.nbytes,
        "created_at": file.created_s,
        "expires_at": file.expires_s,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
    }


def file_list(page: Page) -> FileList:
    """What is told of some files."""
    data = [file_object(file) for file in page.files]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": page.has_more,
    }


def deleted_file(file_id: str) -> FileDeleted:
    """What is told of a file that was deleted."""
    return {"id": file_id, "object": "file", "deleted": True}


def _validated(kind: TypeAdapter[_T], values: Mapping[str, Any]) -> _T:
    try:
        return kind.validate_python(values)
    except ValidationError as error:
        raise fault_of(error) from None
