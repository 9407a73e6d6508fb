"""What a client may send to `/v1/chat/completions`: OpenAI's fields and vLLM's extensions, under their names.

A field that is not listed is refused by name rather than ignored: an answer that silently disregards what was asked
for is worse than an error. Numbers that cost memory or time are bounded here (threats S15).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from semel.core import Tenant
from semel.render import ChatRequest

__all__ = ["ChatCompletionRequest", "StreamOptions"]

_SAMPLING: Final = frozenset(
    {
        "frequency_penalty",
        "ignore_eos",
        "logit_bias",
        "min_p",
        "min_tokens",
        "n",
        "presence_penalty",
        "repetition_penalty",
        "seed",
        "skip_special_tokens",
        "stop",
        "stop_token_ids",
        "temperature",
        "top_k",
        "top_p",
    }
)
"""Fields that are the engine's sampling parameters under the same name."""


_Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
_Tokens = Annotated[int, Field(ge=1, le=2**31 - 1)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptions(_Body):
    """What a stream carries besides text."""

    include_usage: bool = False


class ChatCompletionRequest(_Body):
    """A chat, and how to answer it."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    max_tokens: _Tokens | None = None
    max_completion_tokens: _Tokens | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    seed: _Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[_Int64, float], Field(max_length=1_024)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0

    top_k: _Int64 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[_Int64], Field(max_length=128)] | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool = False

    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] = Field(default_factory=dict)
    cache_salt: str | None = None

    def chat(self) -> ChatRequest:
        """What decides the prompt."""
        return ChatRequest(
            messages=self.messages,
            tools=self.tools,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
            mm_processor_kwargs=self.mm_processor_kwargs,
        )

    def tenant(self, name: str = "") -> Tenant:
        """Whose items these are."""
        return Tenant(name, self.cache_salt)

    def sampling(self) -> Mapping[str, object]:
        """What the engine needs to know, under its own names; what the client left open is left to the engine."""
        asked = self.model_dump(include=set(_SAMPLING), exclude_none=True)
        limit = self.max_completion_tokens or self.max_tokens
        if limit is not None:
            asked["max_tokens"] = limit
        if self.logprobs:
            asked["logprobs"] = self.top_logprobs
        return asked
