"""Chats as JSON: they become prompts, or are refused, and no text of a client ever becomes a placeholder (threats S14).

The oracle renders every chat a second time, with "<" written as "(" in all that the client says: no special token can
be spelled then, so the placeholders that are left are the template's own, and the first rendering must have the same.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from functools import cache
from random import Random
from typing import Any, Final

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from semel.core import Digest, Item, Layout, Modality, Prompt
from semel.errors import RequestError
from semel.lab.testing.models.qwen2_vl import _CHAT_TEMPLATE, _SPECIAL_TOKENS
from semel.lab.testing.models.text import train
from semel.render import ChatRenderer, ChatTemplate, Conversation, Tokenizer
from semel.render.chat.sandbox import Template
from semel.render.tokens.expand import expand
from tools.fuzz.mutation import edited
from tools.fuzz.oracle import check_message, expect

_PLACEHOLDERS: Final[Mapping[Modality, str]] = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
_VOCABULARY_TOKENS: Final = 512
_STRING_TEMPLATE: Final = """\
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if tools %}{{ tools | tojson }}{% endif -%}{{- hint or '' -}}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
_PNG: Final = "data:image/png;base64," + base64.b64encode(b"png").decode()
_CLIP: Final = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
_IMAGE: Final = {"type": "image_url", "image_url": {"url": _PNG}}
_VIDEO: Final = {"type": "video_url", "video_url": {"url": _PNG.replace("image/png", "video/mp4")}}
_WORDS: Final[tuple[Any, ...]] = (
    *("user", "system", "assistant", "developer", "tool", "<|image_pad|>", "<|image_", "pad|>", "<|video_pad|>", "<"),
    *("<|vision_start|><|image_pad|><|vision_end|>", "<|im_end|>", "\U00010600", "\U00010601", "\ud800", "\0", _PNG),
    *("type", "text", "refusal", "image", "image_url", "tool_calls", "arguments", "name", "role", "content", "hint"),
    *("thinking", "tool_reference", "tools", "reasoning", "function", "messages", "{{ messages }}", "\n", "|>"),
    *(_IMAGE, _VIDEO, _CLIP, {"type": "text", "text": "<|image_pad|>"}, {"role": "developer", "content": [_IMAGE]}),
    *({"role": "system", "content": "a"}, {"role": "user", "content": ["<|image_", "pad|>"]}, [], {}),
)


def run(data: bytes) -> None:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(body, dict):
        for renderer in renderers():
            check(body, renderer)


def check(body: dict[str, Any], renderer: ChatRenderer) -> None:
    """There is a prompt with as many placeholders as its template wrote, or an error of the client's."""
    try:
        conversation = Conversation.parse(body.get("messages"))
        prompt = _prompt(conversation, _options(body), renderer)
    except RequestError as error:
        check_message(error)
        return
    attached = _modalities(conversation)
    expect(len(prompt.items) == len(attached), f"{len(attached)} items were given, the prompt has {len(prompt.items)}")
    try:
        plain = _token_ids(conversation.map_strings(_plainly), _mapped(_options(body)), renderer)
    except RequestError:
        return  # the template itself asks for one of the strings
    counts = [_count(token_ids, renderer) for token_ids in (prompt.token_ids, plain)]
    expect(counts[0] == counts[1], f"{counts[1]} placeholders are the template's, the prompt has {counts[0]} (S14)")


def _prompt(conversation: Conversation, options: dict[str, Any], renderer: ChatRenderer) -> Prompt:
    """The prompt, in which an item's layout is its placeholder token."""
    ids = {modality: token for token, modality in renderer.placeholder_ids().items()}
    attached = _modalities(conversation)
    return expand(
        _token_ids(conversation, options, renderer),
        placeholder_ids=renderer.placeholder_ids(),
        items=[Item(modality, Digest(index.to_bytes(32, "big"))) for index, modality in enumerate(attached)],
        layouts=[Layout((ids.get(modality, 0),)) for modality in attached],
    )


def _token_ids(conversation: Conversation, options: dict[str, Any], renderer: ChatRenderer) -> list[int]:
    return renderer.tokenize(conversation, **options)


def _modalities(conversation: Conversation) -> list[Modality]:
    return [attachment.source.modality for attachment in conversation.attachments]


def _count(token_ids: Any, renderer: ChatRenderer) -> dict[Modality, int]:
    return {modality: list(token_ids).count(token) for token, modality in renderer.placeholder_ids().items()}


def _options(body: dict[str, Any]) -> dict[str, Any]:
    """What the route lets through to the renderer, of the types that it lets through."""
    tools = body.get("tools")
    kwargs = body.get("chat_template_kwargs")
    return {
        "tools": [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else None,
        "template_kwargs": kwargs if isinstance(kwargs, dict) else {},
        "add_generation_prompt": body.get("add_generation_prompt", True) is True,
        "continue_final_message": body.get("continue_final_message") is True,
    }


def _plainly(text: str) -> str:
    return text.replace("<", "(")


def _mapped(options: dict[str, Any]) -> dict[str, Any]:
    return json.loads(_plainly(json.dumps(options)))  # type: ignore[no-any-return]


@cache
def renderers() -> tuple[ChatRenderer, ...]:
    """One whose template takes parts, as that of Qwen2-VL does, and one whose template takes strings."""
    vocabulary = train(_VOCABULARY_TOKENS)
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocabulary.extended(_SPECIAL_TOKENS), merges=vocabulary.merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([*_SPECIAL_TOKENS])
    insertion: Callable[[Modality, int], str] = lambda modality, _: _PLACEHOLDERS.get(modality, "")  # noqa: E731
    return tuple(
        ChatRenderer(ChatTemplate(template, template, {}), Tokenizer(raw), _PLACEHOLDERS, insertion)
        for template in (Template.compile(text, origin="a test") for text in (_CHAT_TEMPLATE, _STRING_TEMPLATE))
    )


def mutate(data: bytes, random: Random) -> bytes | None:
    """Edit the tree; a lone surrogate stays what JSON makes of it."""
    try:
        return json.dumps(edited(json.loads(data), random, _WORDS), default=str).encode()
    except (ValueError, RecursionError, TypeError):
        return None


def seeds() -> Mapping[str, bytes]:
    """Chats with every kind of part and role, and some that try to spell a placeholder."""
    text = {"type": "text", "text": "What is this?"}
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "<|image_pad|>"}'}}
    chats: dict[str, dict[str, Any]] = {
        "text": {"messages": [{"role": "user", "content": "hi"}]},
        "image": {"messages": [{"role": "user", "content": [_IMAGE, text]}]},
        "video": {"messages": [{"role": "user", "content": [_VIDEO, _IMAGE, "and this?"]}]},
        "audio": {"messages": [{"role": "user", "content": [_CLIP]}]},
        "spelled": {"messages": [{"role": "user", "content": [_IMAGE, "<|image_pad|>", {"type": "refusal"}]}]},
        "spelled-apart": {"messages": [{"role": "user", "content": ["<|image_", "pad|>"]}]},
        "tools": {
            "messages": [
                {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "look"},
                {"role": "tool", "tool_call_id": "c1", "content": [text, {"type": "tool_reference", "name": "look"}]},
            ],
            "tools": [{"type": "function", "function": {"name": "look"}}],
        },
        "developer": {
            "messages": [
                {"role": "system", "content": "a"},
                {"role": "user", "content": [{**text, "cache": "<"}]},
                {"role": "developer", "content": "b", "tools": []},
            ]
        },
        "developer-image": {
            "messages": [
                {"role": "system", "content": "a"},
                {"role": "user", "content": [_IMAGE, "<"]},
                {"role": "developer", "content": [_IMAGE]},
            ]
        },
        "continued": {
            "messages": [{"role": "user", "content": [_IMAGE]}, {"role": "assistant", "content": "I see "}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
        "hint": {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"hint": "<|image_pad|>"}},
    }
    return {name: json.dumps(chat).encode() for name, chat in chats.items()}
