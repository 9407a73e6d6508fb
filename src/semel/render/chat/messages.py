"""OpenAI chat messages, parsed once from JSON and checked: roles, parts, and the fields that templates may use.

Everything that vLLM's chat route accepts is accepted, except embeddings as input. Anything else is an error that names
the location, such as `messages[2].content[1]`. The result has media as bytes, or as a URL that is fetched later.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from semel.errors import InvalidRequest
from semel.render.media.json_values import kind_of, string_of
from semel.render.media.part_source import MEDIA_TYPES, NO_FILES, Files, name_of, source_of
from semel.render.media.source import Source
from semel.render.tokens.placeholder_escape import map_strings, strings_in

__all__ = ["MESSAGE", "Attachment", "Conversation", "Message", "Part", "Text", "ToolReference"]

_TEXT_FIELDS: Final = {
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "text": "text",
    "thinking": "thinking",
}
_SUPPORTED: Final = sorted({*_TEXT_FIELDS, *MEDIA_TYPES, "tool_reference"})
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
    """The client's name for it (`uuid`)."""

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

    def strings(self) -> Iterator[str]:
        """Yield every string that a template might show."""
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
        """Return the same conversation with `change` applied to each of its strings."""

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


def _message(message: object, where: str, files: Files) -> Message:
    if not isinstance(message, dict):
        raise InvalidRequest.of(where, f"must be an object, not {kind_of(message)}")
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequest.of(f"{where}.role", f'must be a string such as "user", not {kind_of(role)}')
    parts = tuple(_parts(message.get("content"), f"{where}.content", files))
    return Message(role, parts, dict(_fields(role, message, where)))


def _parts(content: object, where: str, files: Files) -> Iterator[Part]:
    if content is None:
        return
    if isinstance(content, str):
        yield Text(content)
        return
    if not isinstance(content, list):
        raise InvalidRequest.of(where, f"must be a string, a list of parts or null, not {kind_of(content)}")
    for index, part in enumerate(content):
        if (parsed := _part(part, f"{where}[{index}]", files)) is not None:
            yield parsed


def _part(part: object, where: str, files: Files) -> Part | None:
    if isinstance(part, str):
        return Text(part)
    if not isinstance(part, dict):
        raise InvalidRequest.of(where, f"must be an object or a string, not {kind_of(part)}")
    kind = part.get("type") or next((name for name in _TYPES_BY_FIELD if name in part), None)
    if not isinstance(kind, str):
        raise InvalidRequest.of(f"{where}.type", f'must be a string such as "text", not {kind_of(kind)}')
    extra = {name: value for name, value in part.items() if name not in _KNOWN_FIELDS}
    if kind in _TEXT_FIELDS:
        return _text(part, kind, extra, where)
    if kind in MEDIA_TYPES:
        name = name_of(part, kind, where)
        return Attachment(source_of(part, kind, name, files, where), extra, name, where)
    if kind == "tool_reference":
        return ToolReference(string_of(part.get("name"), f"{where}.name"))
    raise InvalidRequest.of(where, f"type {kind[:32]!r} is not supported: use one of {', '.join(_SUPPORTED)}")


def _text(part: dict[str, Any], kind: str, extra: dict[str, object], where: str) -> Text | None:
    name = _TEXT_FIELDS[kind]
    text = part.get(name)
    if text is None and kind in ("text", "refusal"):
        return None  # clients send messages back as they received them, with null for absent content
    return Text(string_of(text, f"{where}.{name}"), extra)


def _fields(role: str, message: dict[str, Any], where: str) -> Iterator[tuple[str, object]]:
    if role == "assistant":
        if calls := message.get("tool_calls"):
            yield "tool_calls", _tool_calls(calls, f"{where}.tool_calls")
        # The second is the older name of the first. Clients send one of them, and templates know one of them.
        names = ("reasoning", "reasoning_content")
        if (reasoning := next((message[name] for name in names if message.get(name) is not None), None)) is not None:
            yield from ((name, string_of(reasoning, f"{where}.reasoning")) for name in names)
    if role == "tool" and "tool_call_id" in message:
        yield "tool_call_id", message["tool_call_id"]
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            yield name, message[name]
    if role == "developer":
        yield "tools", message.get("tools")


def _tool_calls(calls: object, where: str) -> list[object]:
    if not isinstance(calls, list):
        raise InvalidRequest.of(where, f"must be a list, not {kind_of(calls)}")
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: object, where: str) -> dict[str, object]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or call.get("type", "function") != "function":
        raise InvalidRequest.of(where, 'must be an object of type "function" with an object "function"')
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: object) -> dict[str, object]:
    """Return the arguments of a call as an object, which templates expect.

    Anything else becomes an empty object: a model wrote it, it is in the history of the chat, and a refusal would make
    that chat unusable.
    """
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}
    return arguments if isinstance(arguments, dict) else {}
