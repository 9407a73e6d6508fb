"""A chat as a client asks for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["ChatRequest"]


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
