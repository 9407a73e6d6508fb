"""The input of a Responses request as the messages of a chat. Pure.

Items become messages as in vLLM: reasoning, text and calls that follow each other are one message of the assistant, as
far as it has a place for them. Parts of content that are the same in a chat stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from semel.errors import InvalidRequest
from semel.frontend.api.openai.translation import Messages, file_of
from semel.render.media.json_values import at_least_one, list_of, object_of, string_of

__all__ = ["CUSTOM_INPUT", "add_items", "continues_last", "input_messages"]

CUSTOM_INPUT: Final = "input"
"""The only argument of the function that a custom tool becomes, as in vLLM: the tool's text."""

# Tuples: a client may send a list where a string belongs, which no set can be asked for.
_TEXTS: Final = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_ROLES: Final = ("user", "assistant", "system", "developer")
_OPEN: Final = ("in_progress", "incomplete")
_FILE: Final = ("file_data", "file_id", "file_url", "page_range", "dpi")
_SUPPORTED: Final = (
    "message, function_call, function_call_output, custom_tool_call, custom_tool_call_output and reasoning"
)


def input_messages(instructions: str | None, request_input: str | list[dict[str, Any]]) -> Messages:
    """The messages of a chat with these instructions and this input."""
    made = Messages()
    if instructions:
        made.add({"role": "system", "content": instructions}, "instructions")
    if isinstance(request_input, str):
        made.add({"role": "user", "content": request_input}, "input")
        return made
    add_items(request_input, "input", made)
    at_least_one(made.messages, "input", "message")
    return made


def add_items(items: Sequence[dict[str, Any]], where: str, made: Messages) -> None:
    """Add the messages that items are; `where` is the list of the items, for errors."""
    for index, item in enumerate(items):
        _add_item(item, f"{where}[{index}]", made)


def continues_last(request_input: str | list[dict[str, Any]]) -> bool:
    """True if the answer goes on with the last message: the client sends it as one that is not complete."""
    if isinstance(request_input, str) or not request_input or not isinstance(last := request_input[-1], dict):
        return False
    return last.get("role") == "assistant" and last.get("status") in _OPEN


def _add_item(value: object, where: str, made: Messages) -> None:
    item = object_of(value, where)
    kind = item.get("type") or ("message" if "role" in item else None)
    match kind:
        case "message":
            _add_message(item, where, made)
        case "function_call" | "custom_tool_call":
            made.call(_call(item, str(kind), where), where)
        case "function_call_output" | "custom_tool_call_output":
            call_id = string_of(item.get("call_id"), f"{where}.call_id")
            content = _content(item.get("output"), f"{where}.output")
            made.add({"role": "tool", "tool_call_id": call_id, "content": content}, where)
        case "reasoning":
            _add_reasoning(item, where, made)
        case "item_reference":
            raise InvalidRequest.of(
                where, "stored items are not looked up; send the item itself, or previous_response_id"
            )
        case str():
            raise InvalidRequest.of(where, f"type {kind[:32]!r} is not supported; items are {_SUPPORTED}")
        case _:
            raise InvalidRequest.of(f"{where}.type", 'must be a string such as "message"')


def _add_message(item: dict[str, Any], where: str, made: Messages) -> None:
    role = string_of(item.get("role"), f"{where}.role")
    if role not in _ROLES:
        raise InvalidRequest.of(f"{where}.role", f"must be one of {', '.join(sorted(_ROLES))}, not {role[:32]!r}")
    content = _content(item.get("content"), f"{where}.content")
    if role == "assistant":
        made.put("content", _joined(content), where)
    else:
        made.add({"role": role, "content": content}, where)


def _add_reasoning(item: dict[str, Any], where: str, made: Messages) -> None:
    if item.get("encrypted_content"):
        raise InvalidRequest.of(
            f"{where}.encrypted_content", "cannot be read here; leave it out, and send the reasoning in content"
        )
    content = _content(item.get("content") or item.get("summary") or [], f"{where}.content")
    text = content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)
    made.put("reasoning", text, where)


def _call(item: dict[str, Any], kind: str, where: str) -> dict[str, Any]:
    """The call of a function; a custom tool is a function whose only argument is its text."""
    name = string_of(item.get("name"), f"{where}.name")
    if item.get("namespace"):
        raise InvalidRequest.of(f"{where}.namespace", "there are no namespaces; send the tool's whole name")
    if kind == "function_call":
        arguments = string_of(item.get("arguments"), f"{where}.arguments")
    else:
        arguments = json.dumps({CUSTOM_INPUT: string_of(item.get("input"), f"{where}.input")}, ensure_ascii=False)
    call_id = string_of(item.get("call_id"), f"{where}.call_id")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _content(value: object, where: str) -> str | list[Any]:
    if isinstance(value, str):
        return value
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(list_of(value, where))]


def _part(value: object, where: str) -> dict[str, Any]:
    part = object_of(value, where)
    match part.get("type"):
        case kind if kind in _TEXTS:
            return {"type": "text", "text": string_of(part.get("text"), f"{where}.text")}
        case "input_image":
            url, file_id = part.get("image_url"), part.get("file_id")
            return {"type": "image_url", "image_url": {"url": url} if file_id is None else file_of(file_id, url)}
        case "input_file":
            return {"type": "file", "file": {name: part[name] for name in _FILE if part.get(name) is not None}}
        case _:
            return part  # as in a chat, or refused by name where chats are read


def _joined(content: str | list[Any]) -> str | list[Any]:
    """The content of an assistant's message: usually one text."""
    if isinstance(content, list) and len(content) == 1 and content[0].get("type") == "text":
        return str(content[0]["text"])
    return content
