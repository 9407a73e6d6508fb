"""A chat as a client asks for it, and its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from semel.render.chat.messages import Conversation
from semel.render.chat.renderer import ChatRenderer
from semel.render.offload import run_if_heavy
from semel.render.tokens.tokenizer import TextRoom

__all__ = ["ChatRequest", "tokenize_chat"]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """The parts of a chat request that determine the prompt, under OpenAI's and vLLM's names."""

    messages: Sequence[object]
    tools: Sequence[object] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, object] = field(default_factory=dict)
    mm_processor_kwargs: Mapping[str, object] = field(default_factory=dict)
    return_media_ids: bool = False
    """Whether the ids of all items are wanted, by which later chats may name them."""


async def tokenize_chat(
    renderer: ChatRenderer, conversation: Conversation, request: ChatRequest, light: bool, room: TextRoom
) -> list[int]:
    """Return the tokens of a chat, made off the event loop unless it is `light`."""
    tokenize = partial(
        renderer.tokenize,
        conversation,
        tools=request.tools,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        template_kwargs=request.chat_template_kwargs,
        room=room,
    )
    return await run_if_heavy(tokenize, light=light and renderer.tokenizer.is_local)
