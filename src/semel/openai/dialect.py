"""Dialects of requests: the media in them, and their ids. Pure: values in, values out.

A dialect is one API: `ChatCompletions` and `Responses` are OpenAI's. What knows the shape of a request or an answer is
in its dialect; the rest of the package knows digests and ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from blake3 import blake3

__all__ = ["CHAT_COMPLETIONS", "RESPONSES", "ChatCompletions", "Dialect", "Responses"]

Body = Mapping[str, Any]
"""The JSON object of a request or an answer."""

_MIN_CHARS: Final = 1_024
"""Shorter media are sent as they are: an id has 70 characters, and may be unknown."""

_URL_FIELDS: Final = {
    "audio_url": "audio_url",
    "image_url": "image_url",
    "input_image": "image_url",
    "video_url": "video_url",
}
"""The field that has the URL, by the type of a part."""

_TYPES_BY_FIELD: Final = ("image_url", "audio_url", "input_audio", "video_url", "file")
"""The types of a part without "type", by the field that it has."""

_MEDIA_TYPES: Final = frozenset({*_URL_FIELDS, "input_audio", "file", "input_file"})


class ChatCompletions:
    """OpenAI's chat completions, with semel's `return_media_ids` and `file_id`."""

    def takes(self, path: str) -> bool:
        """Return whether this is a path of the API."""
        return path.endswith("/chat/completions")

    def digests(self, body: Body) -> tuple[bytes | None, ...]:
        """Return the digests of all media, in the order of the ids in an answer; None where bytes stay.

        Media with a `uuid` stay: their bytes are bound to that name.
        """
        return _digests(body, _parts(body.get("messages"), "content"))

    def request(self, body: Body, ids: Sequence[str | None]) -> Body:
        """Return the request that names media by these ids, where there is one, and asks for the ids of all.

        In a stream they come with the usage.
        """
        messages = _named(body["messages"], ids, _reference, "content")
        options: dict[str, Any] = {}
        if body.get("stream") and not _has_usage(body):
            options = {"stream_options": {**(body.get("stream_options") or {}), "include_usage": True}}
        return {**body, "messages": messages, "return_media_ids": True, **options}

    def ids(self, answer: Body) -> list[str | None] | None:
        """Return the ids in an answer, or in an event of a stream, if it has them."""
        return _ids(answer)

    def is_end(self, event: Body) -> bool:  # noqa: ARG002
        """Return whether a stream is complete with this event, and not with `[DONE]`."""
        return False

    def answer(self, body: Body, answer: Body) -> Body | None:
        """Return an answer or event without what `request` added; None for an event that is not for the caller."""
        dropped = set() if body.get("return_media_ids") else {"media_ids"}
        if body.get("stream") and not _has_usage(body):
            if answer.get("usage") is not None and not answer.get("choices"):
                return None
            dropped.add("usage")
        return {name: value for name, value in answer.items() if name not in dropped}


class Responses:
    """OpenAI's Responses, with the same: parts are in messages and in what tools returned."""

    def takes(self, path: str) -> bool:
        """Return whether this is a path of the API."""
        return path.endswith("/responses")

    def digests(self, body: Body) -> tuple[bytes | None, ...]:
        """Return the digests of all media."""
        return _digests(body, _parts(body.get("input"), "content", "output"))

    def request(self, body: Body, ids: Sequence[str | None]) -> Body:
        """Return the request that names media by ids and asks for ids."""
        items = _named(body["input"], ids, _input_reference, "content", "output")
        return {**body, "input": items, "return_media_ids": True}

    def ids(self, answer: Body) -> list[str | None] | None:
        """Return the ids in an answer, or in the one that the last event of a stream has."""
        return _ids(_response(answer))

    def is_end(self, event: Body) -> bool:
        """Detect the end of a stream: it is the complete answer."""
        return event.get("type") in ("response.completed", "response.incomplete")

    def answer(self, body: Body, answer: Body) -> Body | None:
        """Return the answer without what `request` added."""
        if body.get("return_media_ids") or "media_ids" not in (response := _response(answer)):
            return answer
        cleaned = {name: value for name, value in response.items() if name != "media_ids"}
        return cleaned if response is answer else {**answer, "response": cleaned}


CHAT_COMPLETIONS: Final = ChatCompletions()
RESPONSES: Final = Responses()
Dialect = ChatCompletions | Responses


def _response(answer: Body) -> Body:
    """Return the answer itself, of an event that has it."""
    inner = answer.get("response")
    return inner if isinstance(inner, dict) else answer


def _ids(answer: Body) -> list[str | None] | None:
    ids = answer.get("media_ids")
    return ids if isinstance(ids, list) and all(one is None or isinstance(one, str) for one in ids) else None


def _parts(items: Any, *fields: str) -> Iterator[Any]:
    """Yield the parts in these fields of messages or items, in order."""
    for item in items if isinstance(items, list) else ():
        for field in fields:
            if isinstance(item, dict) and isinstance(item.get(field), list):
                yield from item[field]


def _digests(body: Body, parts: Iterator[Any]) -> tuple[bytes | None, ...]:
    salt = str(body.get("cache_salt"))
    return tuple(
        None if (content := _content(kind, part)) is None else _digest(salt, kind, *content)
        for part in parts
        if (kind := _kind(part)) is not None
    )


def _named(
    items: list[Any], ids: Sequence[str | None], reference: Callable[[str, Any, str], Any], *fields: str
) -> list[Any]:
    """Return the messages or items with ids in the place of media, where there is one."""
    left = iter(ids)

    def named(part: Any) -> Any:
        if (kind := _kind(part)) is None or (media_id := next(left)) is None:
            return part
        return reference(kind, part, media_id)

    def changed(item: Any) -> Any:
        lists = [field for field in fields if isinstance(item, dict) and isinstance(item.get(field), list)]
        return {**item, **{field: [named(part) for part in item[field]] for field in lists}} if lists else item

    return [changed(item) for item in items]


def _kind(part: Any) -> str | None:
    """Return the type of a part, if it has media."""
    if not isinstance(part, dict):
        return None
    kind = part.get("type") or next((name for name in _TYPES_BY_FIELD if name in part), None)
    return kind if isinstance(kind, str) and kind in _MEDIA_TYPES else None


def _content(kind: str, part: dict[str, Any]) -> tuple[str, str] | None:
    """Return what a part sends inline, and its format if that is apart from it."""
    if part.get("uuid") is not None:
        return None
    name = _URL_FIELDS.get(kind, kind)
    value = part.get(name)
    data: object
    if name == "input_audio":
        data, form = (value.get("data"), value.get("format")) if isinstance(value, dict) else (None, None)
        is_inline = isinstance(form, str)
    else:
        data, form = value.get("url") if isinstance(value, dict) else value, ""
        is_inline = name != "file" and isinstance(data, str) and data[:5].lower() == "data:"
    return (data, str(form)) if is_inline and isinstance(data, str) and len(data) >= _MIN_CHARS else None


def _digest(*texts: str) -> bytes:
    """Return a digest of texts in this order; no other texts have the same."""
    state = blake3()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.digest()


def _reference(kind: str, part: dict[str, Any], media_id: str) -> dict[str, Any]:
    """Return the part with an id in the place of its bytes."""
    if kind == "input_audio":
        rest = {name: value for name, value in part.items() if name not in ("input_audio", "type")}
        return {"type": "audio_url", "audio_url": {"file_id": media_id}, **rest}
    name, value = _URL_FIELDS[kind], part[_URL_FIELDS[kind]]
    options = {field: one for field, one in value.items() if field != "url"} if isinstance(value, dict) else {}
    return {**part, name: {**options, "file_id": media_id}}


def _input_reference(kind: str, part: dict[str, Any], media_id: str) -> dict[str, Any]:
    """Return the same in a Responses request, whose images have no object around a URL."""
    if kind != "input_image":
        return _reference(kind, part, media_id)
    return {**{name: value for name, value in part.items() if name != "image_url"}, "file_id": media_id}


def _has_usage(body: Body) -> bool:
    """Return whether the caller wants the usage in a stream."""
    options = body.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage") or options.get("continuous_usage_stats"))
