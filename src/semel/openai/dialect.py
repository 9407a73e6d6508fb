"""Dialects of requests: the media in them, and their ids. Pure: values in, values out.

A dialect is one API: `CHAT_COMPLETIONS` and `RESPONSES` are OpenAI's, `MESSAGES` is Anthropic's. What knows the shape
of a request or an answer is in its dialect; the rest of the package knows digests and ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from blake3 import blake3

__all__ = ["CHAT_COMPLETIONS", "MESSAGES", "RESPONSES", "ChatCompletions", "Dialect", "EventDialect"]

Body = Mapping[str, Any]
"""The JSON object of a request or an answer."""

Part = dict[str, Any]
"""A part of a message's content, also called a block."""

_MIN_CHARS: Final = 1_024
"""Shorter media are sent as they are: an id has 70 characters, and may be unknown."""

_MEDIA_FIELDS: Final = {
    "audio_url": "audio_url",
    "document": "source",
    "file": "file",
    "image": "source",
    "image_url": "image_url",
    "input_audio": "input_audio",
    "input_file": "file_data",
    "input_image": "image_url",
    "video_url": "video_url",
}
"""The field that has the media, by the type of a part."""

_TYPES_BY_FIELD: Final = ("image_url", "audio_url", "input_audio", "video_url", "file")
"""The types of a part without "type", by the field that it has."""

_PART_FIELDS: Final = ("content", "output")
"""The fields of messages, items and blocks that have lists of parts."""

_DEPTH: Final = 2
"""Parts are in messages, and in the blocks of these that a tool returned."""


class ChatCompletions:
    """OpenAI's chat completions, with semel's `return_media_ids` and `file_id`."""

    def takes(self, path: str) -> bool:
        """Return whether this is a path of the API."""
        return path.endswith("/chat/completions")

    def digests(self, body: Body) -> tuple[bytes | None, ...]:
        """Return the digests of all media, in the order of the ids in an answer; None where bytes stay.

        Media with a `uuid` stay: their bytes are bound to that name.
        """
        return _digests(body, "messages")

    def request(self, body: Body, ids: Sequence[str | None]) -> Body:
        """Return the request that names media by these ids, where there is one, and asks for the ids of all.

        In a stream they come with the usage.
        """
        options: dict[str, Any] = {}
        if body.get("stream") and not _has_usage(body):
            options = {"stream_options": {**(body.get("stream_options") or {}), "include_usage": True}}
        return {**body, "messages": _named(body["messages"], ids, _chat_part), "return_media_ids": True, **options}

    def ids(self, answer: Body) -> list[str | None] | None:
        """Return the ids in an answer, or in an event of a stream, if it has them."""
        return _ids(answer)

    def is_end(self, event: Body) -> bool:  # noqa: ARG002
        """Return whether an event is the one that has the ids, if there are any; a chat's stream may end without."""
        return False

    def answer(self, body: Body, answer: Body) -> Body | None:
        """Return an answer or event without what `request` added; None for an event that is not for the caller."""
        dropped = set() if body.get("return_media_ids") else {"media_ids"}
        if body.get("stream") and not _has_usage(body):
            if answer.get("usage") is not None and not answer.get("choices"):
                return None
            dropped.add("usage")
        return {name: value for name, value in answer.items() if name not in dropped}


@dataclass(frozen=True, slots=True)
class EventDialect:
    """An API with the same, in whose streams events of some types have the answer, and its ids."""

    path: str
    items: str
    """The field of a request that has its messages."""

    inner: str
    """The field of an event that has the answer."""

    events: tuple[str, ...]
    """The types of the events whose answer has the ids."""

    def takes(self, path: str) -> bool:
        """Return whether this is a path of the API."""
        return path.endswith(self.path)

    def digests(self, body: Body) -> tuple[bytes | None, ...]:
        """Return the digests of all media."""
        return _digests(body, self.items)

    def request(self, body: Body, ids: Sequence[str | None]) -> Body:
        """Return the request that names media by ids and asks for ids."""
        return {**body, self.items: _named(body[self.items], ids, _part), "return_media_ids": True}

    def ids(self, answer: Body) -> list[str | None] | None:
        """Return the ids in an answer, or in the one that an event of a stream has."""
        return _ids(self._answer_in(answer))

    def is_end(self, event: Body) -> bool:
        """Return whether an event is the one that has the ids, if there are any."""
        return event.get("type") in self.events

    def answer(self, body: Body, answer: Body) -> Body | None:
        """Return the answer without what `request` added."""
        if body.get("return_media_ids") or "media_ids" not in (inner := self._answer_in(answer)):
            return answer
        cleaned = {name: value for name, value in inner.items() if name != "media_ids"}
        return cleaned if inner is answer else {**answer, self.inner: cleaned}

    def _answer_in(self, answer: Body) -> Body:
        """Return the answer itself, of an event that has it."""
        inner = answer.get(self.inner)
        return inner if isinstance(inner, dict) else answer


CHAT_COMPLETIONS: Final = ChatCompletions()
RESPONSES: Final = EventDialect("/responses", "input", "response", ("response.completed", "response.incomplete"))
MESSAGES: Final = EventDialect("/messages", "messages", "message", ("message_start",))
Dialect = ChatCompletions | EventDialect


def _ids(answer: Body) -> list[str | None] | None:
    ids = answer.get("media_ids")
    return ids if isinstance(ids, list) and all(one is None or isinstance(one, str) for one in ids) else None


def _digests(body: Body, items: str) -> tuple[bytes | None, ...]:
    salt, found = str(body.get("cache_salt")), list[bytes | None]()

    def look(kind: str, part: Part) -> Part:
        content = _content(kind, part)
        found.append(None if content is None else _digest(salt, kind, *content))
        return part

    for item in parts if isinstance(parts := body.get(items), list) else ():
        _with_media(item, look)
    return tuple(found)


def _named(items: list[Any], ids: Sequence[str | None], reference: Callable[[str, Part, str], Part]) -> list[Any]:
    """Return the messages or items with ids in the place of media, where there is one."""
    left = iter(ids)

    def name(kind: str, part: Part) -> Part:
        return part if (media_id := next(left)) is None else reference(kind, part, media_id)

    return [_with_media(item, name) for item in items]


def _with_media(item: Any, change: Callable[[str, Part], Part], depth: int = _DEPTH) -> Any:
    """Return a message, an item or a block in which each part with media is changed, in order."""
    if not isinstance(item, dict) or not depth:
        return item

    def changed(part: Any) -> Any:
        return _with_media(part, change, depth - 1) if (kind := _kind(part)) is None else change(kind, part)

    lists = {field: [*map(changed, item[field])] for field in _PART_FIELDS if isinstance(item.get(field), list)}
    return {**item, **lists}


def _kind(part: Any) -> str | None:
    """Return the type of a part, if it has media."""
    if not isinstance(part, dict):
        return None
    kind = part.get("type") or next((name for name in _TYPES_BY_FIELD if name in part), None)
    return kind if isinstance(kind, str) and kind in _MEDIA_FIELDS else None


def _content(kind: str, part: Part) -> tuple[str, str] | None:
    """Return what a part sends inline, and its format if that is apart from it."""
    value = part.get(_MEDIA_FIELDS[kind])
    fields = value if isinstance(value, dict) else {"url": value}
    is_apart = kind == "input_audio" or fields.get("type") == "base64"
    data = fields.get("data" if is_apart else "file_data" if kind == "file" else "url")
    form = fields.get("format", fields.get("media_type")) if is_apart else ""
    if part.get("uuid") is not None or not isinstance(data, str) or not isinstance(form, str):
        return None
    return (data, form) if len(data) >= _MIN_CHARS and (is_apart or data[:5].lower() == "data:") else None


def _digest(*texts: str) -> bytes:
    """Return a digest of texts in this order; no other texts have the same."""
    state = blake3()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.digest()


def _chat_part(kind: str, part: Part, media_id: str) -> Part:
    """Return the part of a chat with an id in the place of its bytes."""
    if (other := {"image": "image_url", "input_audio": "audio_url"}.get(kind)) is not None:
        rest = {name: value for name, value in part.items() if name not in (_MEDIA_FIELDS[kind], "type")}
        return {"type": other, other: {"file_id": media_id}, **rest}
    name = _MEDIA_FIELDS[kind]
    options = part[name] if isinstance(part[name], dict) else {}
    rest = {field: value for field, value in options.items() if field not in ("url", "file_data")}
    return {**part, name: {**rest, "file_id": media_id}}


def _part(kind: str, part: Part, media_id: str) -> Part:
    """Return the same in the other APIs, whose images and files have no object around a URL."""
    if kind in ("input_image", "input_file"):
        return {**{name: value for name, value in part.items() if name != _MEDIA_FIELDS[kind]}, "file_id": media_id}
    if _MEDIA_FIELDS[kind] == "source":
        return {**part, "source": {"type": "file", "file_id": media_id}}
    return _chat_part(kind, part, media_id)


def _has_usage(body: Body) -> bool:
    """Return whether the caller wants the usage in a stream."""
    options = body.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage") or options.get("continuous_usage_stats"))
