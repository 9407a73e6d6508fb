"""A conversation in the shape that chat templates read: dicts, with content in the template's format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from semel.core import Modality
from semel.render.chat.content_format import ContentFormat
from semel.render.chat.messages import Attachment, Conversation, Message, Part, Text, ToolReference

__all__ = ["Insertion", "transcribe", "without_developer"]


class Insertion(Protocol):
    """The text that represents an item in a template with string content. It depends on the model family."""

    def __call__(self, modality: Modality, index: int, /) -> str:
        """Return the text for the `index`-th item of `modality` in the conversation, counted from 1; empty for none."""
        ...


def transcribe(
    conversation: Conversation,
    *,
    content_format: ContentFormat,
    insertion: Insertion,
    interleaves: bool = False,
    item_separator: str = "\n",
) -> list[dict[str, object]]:
    """The messages for a template. If it takes texts only, items come first, or `interleaves` keeps their places.

    Items that come first are followed by the separator; texts are always lines.
    """
    if content_format == "openai":
        return [{"role": turn.role, "content": _content(turn), **turn.fields} for turn in conversation.messages]
    seen: Counter[Modality] = Counter()
    return [
        {
            "role": turn.role,
            "content": _lines(turn, insertion, seen, item_separator, interleaves=interleaves),
            **turn.fields,
        }
        for turn in conversation.messages
    ]


def without_developer(messages: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """Return the messages for a template without the role "developer": it becomes "system".

    Many such templates accept a system message in the first position only, so several are merged into one there.
    """
    renamed = [_as_system(message) if message["role"] == "developer" else message for message in messages]
    if all(message["role"] != "system" for message in renamed[1:]):
        return renamed
    merged = "\n\n".join(filter(None, (_words(message) for message in renamed if message["role"] == "system")))
    return [{"role": "system", "content": merged}, *(message for message in renamed if message["role"] != "system")]


def _content(message: Message) -> list[dict[str, object]] | str:
    parts = list(map(_template_part, message.parts))
    if message.role == "tool" and all(part["type"] == "text" for part in parts):
        # Most templates render a tool's message unchanged, whatever they do with other messages.
        return "\n".join(str(part["text"]) for part in parts)
    return parts


def _template_part(part: Part) -> dict[str, object]:
    match part:
        case Text(text, extra):
            return {"type": "text", "text": text, **extra}
        case Attachment(source, extra):
            return {"type": source.modality, **extra}
        case ToolReference(name):
            return {"type": "tool_reference", "name": name}


def _lines(
    message: Message, insertion: Insertion, seen: Counter[Modality], item_separator: str, *, interleaves: bool
) -> str:
    """Return the items and texts of the message, each on a line of its own.

    All items come first, grouped by modality, unless `interleaves` keeps them in their places.
    """
    lines: list[tuple[Modality | None, str]] = []
    for part in message.parts:
        match part:
            case Text(text, _) | ToolReference(text):
                lines.append((None, text))
            case Attachment(source, _):
                seen[source.modality] += 1
                lines.append((source.modality, insertion(source.modality, seen[source.modality])))
    if not interleaves:
        groups = [*dict.fromkeys(modality for modality, _ in lines if modality is not None), None]
        lines.sort(key=lambda line: groups.index(line[0]))
    if item_separator != "\n" and not interleaves:
        items = "".join(f"{text}{item_separator}" for modality, text in lines if modality is not None and text)
        return items + "\n".join(text for modality, text in lines if modality is None and text)
    return "\n".join(text for _, text in lines if text)


def _as_system(message: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}


def _words(message: dict[str, object]) -> str:
    content = message["content"]
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if "text" in part)
    return str(content)
