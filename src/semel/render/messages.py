"""OpenAI chat messages, parsed once from JSON and checked: roles, parts, and the fields that templates may use.

Everything that vLLM's chat route accepts is accepted, except embeddings as input. Anything else is an error that names
the location, such as `messages[2].content[1]`. The result has media as bytes, or as a URL that is fetched later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from semel.core import Digest, Media, Modality
from semel.errors import InvalidRequest, UnknownMedia, excerpt
from semel.render.long_string import LongString
from semel.render.media_names import MAX_NAME_CHARS
from semel.render.placeholder_escape import map_strings, strings_in
from semel.render.source import MediaFile, MediaName, Source, media_from_base64, source_from

__all__ = [
    "MESSAGE",
    "NO_FILES",
    "Attachment",
    "Conversation",
    "Files",
    "Message",
    "Part",
    "Text",
    "ToolReference",
    "named_files",
    "put_media",
]

_TEXT_FIELDS: Final = {
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "text": "text",
    "thinking": "thinking",
}
_URL_FIELDS: Final[Mapping[str, tuple[str, Modality]]] = {
    "audio_url": ("audio_url", "audio"),
    "image_url": ("image_url", "image"),
    "input_image": ("image_url", "image"),
    "video_url": ("video_url", "video"),
}
_URL_NAMES: Final = frozenset(name for name, _ in _URL_FIELDS.values())
_FILE_NAMES: Final = ("file", *_URL_NAMES)
_ARTICLES: Final[Mapping[Modality | None, str]] = {
    "audio": "audio",
    "image": "an image",
    "video": "a video",
    None: "neither image, audio nor video",
}
_MEDIA_TYPES: Final = frozenset({*_URL_FIELDS, "file", "image", "input_audio"})
_SUPPORTED: Final = sorted({*_TEXT_FIELDS, *_MEDIA_TYPES, "tool_reference"})
_MAX_MIME_CHARS: Final = 64
_AUDIO_FORMAT: Final = re.compile(r"[\w.+/;= -]{0,64}", re.ASCII)
_TYPES_BY_FIELD: Final = ("image_url", "audio_url", "input_audio", "video_url", "tool_reference", "file")
"""The types of a part without "type": each is the name of the field that such a part must have."""

_PART: Final[Mapping[str, Any]] = {
    "anyOf": [{"type": "string"}, {"type": "object", "properties": {"type": {"enum": [*_SUPPORTED, None]}}}]
}
MESSAGE: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {
        "role": {"type": "string"},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]},
    },
    "required": ["role"],
}
"""The schema of a message; a message that violates it is refused. Errors name what each type of part needs besides."""

_KNOWN_FIELDS: Final = frozenset(
    {"audio_url", "image_url", "input_audio", "name", "refusal", "text", "thinking", "type", "uuid", "video_url"}
    | {"audio_embeds", "closed", "data", "file", "image_embeds", "image_pil", "prompt_cache_breakpoint", "video_embeds"}
    | {"source"}
)
"""The fields of a part that have a meaning in the API. Templates see all others."""


Files = Mapping[str, tuple[Digest, Modality | None]]
"""Files of the request's tenant, by the ids that it has written: what each is, if it can be an item."""

NO_FILES: Final[Files] = {}


@dataclass(frozen=True, slots=True)
class Text:
    """A text part of a message."""

    text: str
    extra: Mapping[str, object] = field(default_factory=dict)
    """Fields of the part that the API does not define, but a template may use."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """Media at its position in a message."""

    source: Source
    extra: Mapping[str, object] = field(default_factory=dict)
    name: str | None = None
    """What the client calls it (`uuid`)."""

    where: str = field(default="", compare=False)
    """The part of the request, for errors."""


@dataclass(frozen=True, slots=True)
class ToolReference:
    """The name of a tool, which the template writes out."""

    name: str


Part = Text | Attachment | ToolReference


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    parts: tuple[Part, ...]
    fields: Mapping[str, object] = field(default_factory=dict)
    """The fields that templates see besides role and content: name, tool_calls, tool_call_id, reasoning, …"""


@dataclass(frozen=True, slots=True)
class Conversation:
    """All messages of one chat request."""

    messages: tuple[Message, ...]

    @classmethod
    def parse(cls, messages: object, files: Files = NO_FILES) -> Self:
        """Parse the field "messages" of a chat request, whose tenant has these files."""
        if not isinstance(messages, list) or not messages:
            raise InvalidRequest.of("messages", "must be a list with at least one message")
        return cls(tuple(_message(message, f"messages[{index}]", files) for index, message in enumerate(messages)))

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        """All attachments in the order of the messages."""
        return tuple(part for message in self.messages for part in message.parts if isinstance(part, Attachment))

    @property
    def sources(self) -> tuple[Source, ...]:
        """All media in the order of the messages."""
        return tuple(part.source for message in self.messages for part in message.parts if isinstance(part, Attachment))

    def strings(self) -> Iterator[str]:
        """Every string that a template might show."""
        for message in self.messages:
            yield message.role
            yield from strings_in(message.fields)
            for part in message.parts:
                match part:
                    case Text(text, extra):
                        yield text
                        yield from strings_in(extra)
                    case Attachment(_, extra) if extra:
                        yield from strings_in(extra)
                    case ToolReference(name):
                        yield name

    def map_strings(self, change: Callable[[str], str]) -> Conversation:
        """The same conversation with `change` applied to each of its strings."""

        def changed(part: Part) -> Part:
            match part:
                case Text(text, extra):
                    return Text(change(text), map_strings(extra, change))
                case Attachment(source, extra, name, where):
                    return Attachment(source, map_strings(extra, change), name, where)
                case ToolReference(name):
                    return ToolReference(change(name))

        return Conversation(
            tuple(
                Message(change(message.role), tuple(map(changed, message.parts)), map_strings(message.fields, change))
                for message in self.messages
            )
        )


def put_media(messages: Sequence[dict[str, Any]], strings: Mapping[str, LongString]) -> int:
    """Put long strings into messages where a field that takes media has their token. Returns how many were put."""
    put = 0
    for fields, name in _media_fields(messages):
        value = fields.get(name)
        if isinstance(value, str) and value in strings:
            fields[name] = strings[value]
            put += 1
    return put


def _media_fields(messages: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], str]]:
    """The objects in messages that may have media, each with the name of the field."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict):
                continue
            for name in _URL_NAMES:
                value = part.get(name)
                yield (value, "url") if isinstance(value, dict) else (part, name)
            if isinstance(audio := part.get("input_audio"), dict):
                yield audio, "data"
            if isinstance(source := part.get("source"), dict):
                yield from ((source, "data"), (source, "url"))


def named_files(messages: Sequence[object]) -> set[str]:
    """The ids of all files that messages name."""
    found: set[str] = set()
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict):
                values = (part.get(name) for name in _FILE_NAMES)
                found.update(id_ for value in values if isinstance(value, dict) and (id_ := _file_id(value)))
    return found


def _message(message: object, where: str, files: Files) -> Message:
    if not isinstance(message, dict):
        raise InvalidRequest.of(where, f"must be an object, not {_kind(message)}")
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequest.of(f"{where}.role", f'must be a string such as "user", not {_kind(role)}')
    parts = tuple(_parts(message.get("content"), f"{where}.content", files))
    return Message(role, parts, dict(_fields(role, message, where)))


def _parts(content: object, where: str, files: Files) -> Iterator[Part]:
    if content is None:
        return
    if isinstance(content, str):
        yield Text(content)
        return
    if not isinstance(content, list):
        raise InvalidRequest.of(where, f"must be a string, a list of parts or null, not {_kind(content)}")
    for index, part in enumerate(content):
        if (parsed := _part(part, f"{where}[{index}]", files)) is not None:
            yield parsed


def _part(part: object, where: str, files: Files) -> Part | None:
    if isinstance(part, str):
        return Text(part)
    if not isinstance(part, dict):
        raise InvalidRequest.of(where, f"must be an object or a string, not {_kind(part)}")
    kind = part.get("type") or next((name for name in _TYPES_BY_FIELD if name in part), None)
    if not isinstance(kind, str):
        raise InvalidRequest.of(f"{where}.type", f'must be a string such as "text", not {_kind(kind)}')
    extra = {name: value for name, value in part.items() if name not in _KNOWN_FIELDS}
    if kind in _TEXT_FIELDS:
        return _text(part, kind, extra, where)
    if kind in _MEDIA_TYPES:
        name = _name(_uuid(part, kind), where)
        return Attachment(_source(part, kind, name, files, where), extra, name, where)
    if kind == "tool_reference":
        return ToolReference(_string(part.get("name"), f"{where}.name"))
    raise InvalidRequest.of(where, f"type {kind[:32]!r} is not supported: use one of {', '.join(_SUPPORTED)}")


def _source(part: dict[str, Any], kind: str, name: str | None, files: Files, where: str) -> Source:
    if kind == "file":
        return _file(part.get("file"), None, files, where)
    if kind == "image":
        return _image_source(part.get("source"), f"{where}.source")
    field_name, modality = _URL_FIELDS.get(kind, ("input_audio", "audio"))
    value = part.get(field_name)
    if name is not None and _is_stripped(value):
        return MediaName(modality, name, where)
    if kind == "input_audio":
        return _input_audio(value, where)
    if isinstance(value, dict) and "file_id" in value:
        return _file(value, modality, files, where)
    return source_from(_url(value, f"{where}.{field_name}"), modality, where=where)


def _is_stripped(value: object) -> bool:
    """Whether a client left the media out: it sends null, or an object whose URL or data are null or empty."""
    if isinstance(value, dict) and "file_id" not in value:
        value = value.get("data") or value.get("url")
    return value is None or value == ""


def _uuid(part: dict[str, Any], kind: str) -> object:
    """What the client calls the media. Dynamo's clients also have it in the object with the URL."""
    value = part.get(_URL_FIELDS[kind][0]) if kind in _URL_FIELDS else None
    nested = value.get("uuid") if isinstance(value, dict) else None
    return part.get("uuid", nested)


def _name(value: object, where: str) -> str | None:
    if value is None:
        return None
    name = _string(value, f"{where}.uuid")
    if not 0 < len(name) <= MAX_NAME_CHARS:
        raise InvalidRequest.of(f"{where}.uuid", f"must have 1 to {MAX_NAME_CHARS} characters, not {len(name):,}")
    return name


def _text(part: dict[str, Any], kind: str, extra: dict[str, object], where: str) -> Text | None:
    name = _TEXT_FIELDS[kind]
    text = part.get(name)
    if text is None and kind in ("text", "refusal"):
        return None  # clients send messages back as they received them, with null for absent content
    return Text(_string(text, f"{where}.{name}"), extra)


def _url(value: object, where: str) -> str | LongString:
    """A URL is a string, or an object with the string in "url"."""
    return _encoded(value.get("url") if isinstance(value, dict) else value, where)


def _file_id(value: Mapping[str, Any]) -> str | None:
    file_id = value.get("file_id")
    return file_id if isinstance(file_id, str) else None


def _file(value: object, modality: Modality | None, files: Files, where: str) -> MediaFile:
    """The file that a part names; `modality` is what the part takes, if it does not take all."""
    if not isinstance(value, dict) or (file_id := _file_id(value)) is None:
        raise InvalidRequest.of(where, 'must have a "file_id", the id of a file that was uploaded to /v1/files')
    if value.get("url") is not None:
        raise InvalidRequest.of(where, 'has a "url" and a "file_id": send one of them')
    if file_id not in files:
        raise UnknownMedia.of(where, f"there is no file {excerpt(repr(excerpt(file_id)))}; upload it again")
    digest, found = files[file_id]
    if found is None or (modality is not None and found != modality):
        raise InvalidRequest.of(where, f"the file is {_ARTICLES[found]}, and cannot be used as {modality or 'media'}")
    return MediaFile(found, digest, where)


def _image_source(value: object, where: str) -> Source:
    """An image as Anthropic's API has it: its URL, or its base64 and what it is."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in ("base64", "url"):
        raise InvalidRequest.of(where, 'must be an object of type "base64" with "data", or of type "url" with "url"')
    if kind == "url":
        return source_from(_encoded(value.get("url"), f"{where}.url"), "image", where=where)
    mime = _string(value.get("media_type", "image/jpeg"), f"{where}.media_type")
    if mime.partition("/")[0].lower() != "image" or len(mime) > _MAX_MIME_CHARS:
        raise InvalidRequest.of(f"{where}.media_type", f'must be a short name such as "image/png", not {mime[:32]!r}')
    return media_from_base64(_encoded(value.get("data"), f"{where}.data"), "image", mime=mime, where=where)


def _input_audio(value: object, where: str) -> Media:
    if not isinstance(value, dict):
        raise InvalidRequest.of(
            f"{where}.input_audio", f'must be an object with "data" and "format", not {_kind(value)}'
        )
    data = _encoded(value.get("data"), f"{where}.input_audio.data")
    format_ = _string(value.get("format"), f"{where}.input_audio.format")
    if not _AUDIO_FORMAT.fullmatch(format_):
        raise InvalidRequest.of(
            f"{where}.input_audio.format",
            f'must be a short name such as "wav", not {format_[:32]!r} of {len(format_):,} characters',
        )
    return media_from_base64(data, "audio", mime=f"audio/{format_}", where=where)


def _fields(role: str, message: dict[str, Any], where: str) -> Iterator[tuple[str, object]]:
    if role == "assistant":
        if calls := message.get("tool_calls"):
            yield "tool_calls", _tool_calls(calls, f"{where}.tool_calls")
        # The second is the older name of the first. Clients send one of them, and templates know one of them.
        names = ("reasoning", "reasoning_content")
        if (reasoning := next((message[name] for name in names if message.get(name) is not None), None)) is not None:
            yield from ((name, _string(reasoning, f"{where}.reasoning")) for name in names)
    if role == "tool" and "tool_call_id" in message:
        yield "tool_call_id", message["tool_call_id"]
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            yield name, message[name]
    if role == "developer":
        yield "tools", message.get("tools")


def _tool_calls(calls: object, where: str) -> list[object]:
    if not isinstance(calls, list):
        raise InvalidRequest.of(where, f"must be a list, not {_kind(calls)}")
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: object, where: str) -> dict[str, object]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or call.get("type", "function") != "function":
        raise InvalidRequest.of(where, 'must be an object of type "function" with an object "function"')
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: object) -> dict[str, object]:
    """The arguments of a call as an object, which templates expect.

    Anything else becomes an empty object: a model wrote it, it is in the history of the chat, and a refusal would make
    that chat unusable.
    """
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}
    return arguments if isinstance(arguments, dict) else {}


def _encoded(value: object, where: str) -> str | LongString:
    return value if isinstance(value, LongString) else _string(value, where)


def _string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest.of(where, f"must be a string, not {_kind(value)}")
    return value


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
    return "an object"
