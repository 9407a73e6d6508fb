"""The messages of an Anthropic request as those of a chat. Pure.

They become messages as in vLLM: the results of tools are messages of their own, before what else the user says, and
images in a result follow it as the user's, since few chat templates show an image in a tool's message. A message of the
system between others becomes the developer's: many templates take the system's first or not at all, and for those that
do not know the developer it is put there (`semel.render.chat.template_messages`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from semel.errors import InvalidRequest
from semel.frontend.api.openai.translation import Messages, file_of
from semel.render.media.json_values import list_of, object_of, optional_string, string_of, type_of

__all__ = ["continues_last", "messages_input"]

_BILLING: Final = "x-anthropic-billing-header"
"""The beginning of a text that some clients put first. It differs in each request, so no prefix would be found again;
it is left out, as in vLLM."""

_ROLES: Final = ("user", "assistant", "system")


def messages_input(system: str | list[dict[str, Any]] | None, messages: list[dict[str, Any]]) -> Messages:
    """The messages of a chat with this system prompt and these messages."""
    made = Messages()
    if text := _system(system, "system"):
        made.add({"role": "system", "content": text}, "system")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = string_of(object_of(message, where).get("role"), f"{where}.role")
        if role not in _ROLES:
            raise InvalidRequest.of(f"{where}.role", f"must be one of {', '.join(_ROLES)}, not {role[:32]!r}")
        content = message.get("content")
        if role == "system":
            if text := _system(content, f"{where}.content"):
                made.add({"role": "developer" if made.messages else "system", "content": text}, where)
        elif isinstance(content, str):
            made.add({"role": role, "content": content}, where)
        else:
            _add_blocks(role, list_of(content, f"{where}.content"), where, made)
    return made


def continues_last(messages: list[dict[str, Any]]) -> bool:
    """True if the answer goes on with the last message: it is the assistant's, and ends with text."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        return False
    content = last.get("content")
    if not isinstance(content, list):
        return bool(content)
    end = content[-1] if content else {}
    return isinstance(end, dict) and end.get("type") == "text" and bool(end.get("text"))


def _system(content: object, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, value in enumerate(list_of(content, where)):
        place = f"{where}[{index}]"
        block = object_of(value, place)
        if type_of(block, place) != "text":
            raise InvalidRequest.of(place, "a system prompt has blocks of type text only")
        texts.append(string_of(block.get("text"), f"{place}.text"))
    return "".join(text for text in texts if not text.startswith(_BILLING))


@dataclass(slots=True)
class _Turn:
    """One message so far."""

    parts: list[dict[str, Any]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """Of its images, which follow those in the results of tools."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)

    def message(self, role: str) -> dict[str, Any] | None:
        """The message; None if there is nothing in it."""
        message: dict[str, Any] = {"role": role}
        if self.reasoning:
            message["reasoning"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        if self.parts:
            is_text = len(self.parts) == 1 and self.parts[0]["type"] == "text"
            message["content"] = self.parts[0]["text"] if is_text else self.parts
        return message if len(message) > 1 else None


def _add_blocks(role: str, blocks: list[Any], where: str, made: Messages) -> None:
    """Add what a message's blocks are in a chat: the results of tools, then a message with all others."""
    turn = _Turn()
    for index, value in enumerate(blocks):
        place = f"{where}.content[{index}]"
        block = object_of(value, place)
        match type_of(block, place):
            case "text":
                if text := string_of(block.get("text"), f"{place}.text"):
                    turn.parts.append({"type": "text", "text": text})
            case "image" | "document" as kind:
                turn.parts += _document(block, place) if kind == "document" else [_image(block, place)]
                turn.numbers.append(len(made.numbers) + len(turn.numbers))
            case "thinking":
                turn.reasoning.append(string_of(block.get("thinking"), f"{place}.thinking"))
            case "redacted_thinking":
                pass  # nobody can read it
            case "tool_use" if role == "assistant":
                turn.calls.append(_call(block, place))
            case "tool_result" if role == "user":
                _add_result(block, place, made, len(turn.numbers))
            case kind:
                raise InvalidRequest.of(place, f"type {kind[:32]!r} is not supported in a message of the {role}")
    made.numbers += turn.numbers
    if (message := turn.message(role)) is not None:
        made.add(message, where)


def _add_result(block: dict[str, Any], where: str, made: Messages, images_before: int) -> None:
    """Add the result of a tool. Whether it is an error is in its text: chats have no field for it.

    `images_before`: how many images of the same message come before it, and are not added yet.
    """
    call_id = string_of(block.get("tool_use_id"), f"{where}.tool_use_id")
    content = block.get("content")
    texts: list[str] = []
    images: list[dict[str, Any]] = []
    references: list[dict[str, Any]] = []
    if isinstance(content, str):
        texts.append(content)
    elif content is not None:
        for index, value in enumerate(list_of(content, f"{where}.content")):
            place = f"{where}.content[{index}]"
            part = object_of(value, place)
            match type_of(part, place):
                case "text":
                    texts.append(string_of(part.get("text"), f"{place}.text"))
                case "image" | "document" as kind:
                    images += _document(part, place) if kind == "document" else [_image(part, place)]
                    made.numbers.append(len(made.numbers) + images_before)
                case "tool_reference":
                    name = part.get("tool_name") or part.get("name")
                    references.append({"type": "tool_reference", "name": string_of(name, f"{place}.tool_name")})
                case kind:
                    raise InvalidRequest.of(place, f"type {kind[:32]!r} is not supported in the result of a tool")
    made.add({"role": "tool", "tool_call_id": call_id, "content": "\n".join(texts)}, where)
    if images:
        made.add({"role": "user", "content": images}, where)
    if references:
        made.add({"role": "tool", "tool_call_id": call_id, "content": references}, where)


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    arguments = object_of(block.get("input"), f"{where}.input")
    name = string_of(block.get("name"), f"{where}.name")
    call_id = string_of(block.get("id"), f"{where}.id")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _document(block: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """A document, after its title and its context, which are texts for the model."""
    citations = block.get("citations")
    if isinstance(citations, dict) and citations.get("enabled"):
        raise InvalidRequest.of(f"{where}.citations", "cannot be made: the model sees pages as images, and no text")
    texts = [text for name in ("title", "context") if (text := optional_string(block.get(name), f"{where}.{name}"))]
    source = object_of(block.get("source"), f"{where}.source")
    options = {name: block[name] for name in ("page_range", "dpi") if block.get(name) is not None}
    if source.get("type") == "file":
        part: dict[str, Any] = {"type": "file", "file": {**file_of(source.get("file_id")), **options}}
    else:
        part = {"type": "document", "source": source, **options}
    return [*({"type": "text", "text": text} for text in texts), part]


def _image(block: dict[str, Any], where: str) -> dict[str, Any]:
    """An image, or the id of its file. Chats take it in this shape too, so that its base64 is not copied."""
    source = object_of(block.get("source"), f"{where}.source")
    if source.get("type") == "file":
        return {"type": "image_url", "image_url": file_of(source.get("file_id"))}
    kept = {name: source[name] for name in ("type", "media_type", "data", "url") if name in source}
    optional_string(kept.get("media_type"), f"{where}.source.media_type")
    return {"type": "image", "source": kept}
