"""A response as it is stored: its JSON, and all items of the conversation that it answers. Pure.

The items are those of `/input_items`: each has an id, and media are files of the media store. They are the whole
conversation, so that to continue it takes one record, however many turns it has.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from semel.errors import InvalidRequest, excerpt
from semel.frontend.api.openai.translation import Messages
from semel.frontend.api.responses.input import add_items
from semel.frontend.api.shared.faults import fault_of
from semel.render.media.part_source import MEDIA_TYPES

__all__ = [
    "Conversation",
    "ItemList",
    "ItemQuery",
    "MediaMismatch",
    "ResponseDeleted",
    "continued",
    "item_page",
    "item_query",
    "pack",
    "stored_items",
    "unpack",
]

_LENGTH: Final = struct.Struct("<I")
_MAX_ID_CHARS: Final = 128
_MEDIA_FIELDS: Final = ("image_url", "audio_url", "video_url", "input_audio", "file")
_MEDIA_TYPES: Final = MEDIA_TYPES | {"input_file"}
_IMAGES: Final = ("image", "image_url", "input_image")
_OPTIONS: Final = ("detail", "dpi", "page_range")
"""The fields next to media that stay; parts of chats have them in the object with the media."""

_CONTENT: Final[Mapping[str, str]] = {
    "message": "content",
    "function_call_output": "output",
    "custom_tool_call_output": "output",
}
"""The fields of items that may have media."""

_PREFIXES: Final[Mapping[str, str]] = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


class MediaMismatch(Exception):
    """The media of a request's items are not those that its chat has."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a response continues."""

    messages: Messages = field(default_factory=Messages)
    items: bytes = b"[]"
    """In JSON, as they are stored."""

    ids: frozenset[str] = frozenset()
    media: int = 0
    """The number of media in the items."""


class _Output(msgspec.Struct):
    output: list[dict[str, Any]]


class ItemQuery(BaseModel):
    """A page of items. What to include is not looked at: all there is comes."""

    model_config = ConfigDict(frozen=True)

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"


class ItemList(TypedDict):
    """Some items of a response's input."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseDeleted(TypedDict):
    """A response that is gone."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


_QUERY: Final = TypeAdapter(ItemQuery)


def pack(answer: bytes, items: bytes) -> bytes:
    """Return the record of a response to these items, both in JSON."""
    return b"".join((_LENGTH.pack(len(answer)), answer, items))


def unpack(record: memoryview) -> tuple[memoryview, memoryview]:
    """Return a stored response and its items, both in JSON."""
    end = _LENGTH.size + _LENGTH.unpack_from(record)[0]
    return record[_LENGTH.size : end], record[end:]


def continued(record: memoryview, where: str) -> Conversation:
    """Return the conversation that a stored response is the end of; `where` is the field that names it, for errors."""
    response, encoded = unpack(record)
    items: list[dict[str, Any]] = msgspec.json.decode(encoded)
    for item in msgspec.json.decode(response, type=_Output).output:
        for part in item.get("content") or () if item["type"] == "message" else ():
            part.pop("logprobs", None)
        items.append(item)
    made = Messages()
    add_items(items, where, made)
    ids = frozenset(str(item["id"]) for item in items)
    return Conversation(made, msgspec.json.encode(items), ids, sum(1 for item in items for _ in _media_parts(item)))


def stored_items(
    request_input: str | Sequence[dict[str, Any]], name: str, before: Conversation, files: Sequence[str]
) -> bytes:
    """Return a request's items behind those before them, in JSON. `files` are the ids of all media, in order.

    Raises `MediaMismatch` if there are more or fewer.
    """
    if isinstance(request_input, str):
        request_input = [{"role": "user", "content": request_input}]
    remaining, ids = iter(files[before.media :]), set(before.ids)
    made: list[dict[str, Any]] = []
    for index, item in enumerate(request_input):
        kind = str(item.get("type") or "message")
        if not isinstance(id_ := item.get("id"), str) or not 0 < len(id_) <= _MAX_ID_CHARS or id_ in ids:
            id_ = f"{_PREFIXES.get(kind, 'item')}_{name}_i{index}"
        ids.add(id_)
        one = {"status": "completed", **item, "type": kind, "id": id_}
        if (content := _CONTENT.get(kind)) is not None:
            one[content] = _stored_content(one, kind, one.get(content), remaining)
        made.append(one)
    if next(remaining, None) is not None:
        raise MediaMismatch
    new = msgspec.json.encode(made)
    return new if before.items == b"[]" else b"".join((before.items[:-1], b",", new[1:]))


def _stored_content(item: dict[str, Any], kind: str, content: object, files: Iterator[str]) -> object:
    text = "output_text" if item.get("role") == "assistant" else "input_text"
    if isinstance(content, str):
        return content if kind != "message" else [_text({"text": content}, text)]
    if not isinstance(content, list):
        return content
    return [_stored_part(part, text, files) for part in content]


def _stored_part(part: Any, text: str, files: Iterator[str]) -> Any:
    if (kind := _kind(part)) in ("text", "input_text", "output_text"):
        return _text(part, text)
    if kind not in _MEDIA_TYPES:
        return part
    if (file_id := next(files, None)) is None:
        raise MediaMismatch
    inner = part.get(kind)
    options = {name: one[name] for one in (part, inner) if isinstance(one, dict) for name in _OPTIONS if name in one}
    if kind in _IMAGES:
        return {"detail": "auto", **options, "type": "input_image", "file_id": file_id}
    return {**options, "type": "input_file", "file_id": file_id}


def _text(part: dict[str, Any], kind: str) -> dict[str, Any]:
    annotations: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
    return {**annotations, **part, "type": kind}


def _kind(part: Any) -> str:
    if not isinstance(part, dict):
        return ""
    return str(part.get("type") or next((name for name in _MEDIA_FIELDS if name in part), ""))


def _media_parts(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    content = item.get(_CONTENT.get(item["type"], ""))
    return (part for part in content if _kind(part) in _MEDIA_TYPES) if isinstance(content, list) else iter(())


def item_query(parameters: Mapping[str, str]) -> ItemQuery:
    """Return the page that the parameters of a URL name."""
    try:
        return _QUERY.validate_python(dict(parameters))
    except ValidationError as error:
        raise fault_of(error) from None


def item_page(encoded: memoryview, query: ItemQuery) -> ItemList:
    """Return some of a stored response's items."""
    items: list[dict[str, Any]] = msgspec.json.decode(encoded)
    if query.order == "desc":
        items.reverse()
    if query.after is not None:
        items = items[_place_of(items, query.after) + 1 :]
    page = items[: query.limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }


def _place_of(items: Iterable[dict[str, Any]], id_: str) -> int:
    for place, item in enumerate(items):
        if item["id"] == id_:
            return place
    raise InvalidRequest.of("after", f"there is no item {excerpt(repr(excerpt(id_)))} in this response's input")
