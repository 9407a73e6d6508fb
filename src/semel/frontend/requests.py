"""What a client may send: OpenAI's fields and vLLM's extensions, under their names.

A field that is not listed is refused by name rather than ignored: an answer that silently disregards what was asked
for is worse than an error. Numbers that cost memory or time are bounded here (threats S15).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from semel.core import Tenant
from semel.render import ChatRequest

__all__ = [
    "ChatCompletionRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "StreamOptions",
    "TokenizeChatRequest",
    "TokenizeRequest",
    "TokenizeTextRequest",
]

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
_Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
_Tokens = Annotated[int, Field(ge=1, le=2**31 - 1)]
_Prompts = 256
"""The most prompts of one request."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


_Salt = Annotated[str, Field(max_length=1_024)]
_Stop = Annotated[str, Field(max_length=1_024)]


class _Body(_Strict):
    model: str | None = None


class _Owned(_Body):
    """A request whose items and prefixes belong to somebody."""

    cache_salt: _Salt | None = None

    def tenant(self, name: str = "") -> Tenant:
        """Whose they are; the name is that of the API key."""
        return Tenant(name, self.cache_salt)


class StreamOptions(_Strict):
    """What a stream carries besides text."""

    include_usage: bool = False


class _Chat(_Owned):
    """What decides the prompt of a chat."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] = Field(default_factory=dict)

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


class _Sampled(_Owned):
    """How to answer, whatever the prompt."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    max_tokens: _Tokens | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = None
    seed: _Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[_Int64, float], Field(max_length=1_024)] | None = None

    top_k: _Int64 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[_Int64], Field(max_length=128)] | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool = False

    def sampling(self) -> Mapping[str, object]:
        """What the engine needs to know, under its own names; what the client left open is left to the engine."""
        asked = self.model_dump(include=set(_SAMPLING), exclude_none=True)
        if self.max_tokens is not None:
            asked["max_tokens"] = self.max_tokens
        return asked


class ChatCompletionRequest(_Chat, _Sampled):
    """A chat, and how to answer it."""

    max_completion_tokens: _Tokens | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0

    def sampling(self) -> Mapping[str, object]:
        """What the engine needs to know, under its own names; what the client left open is left to the engine."""
        asked = dict(super().sampling())
        if self.max_completion_tokens is not None:
            asked["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            asked["logprobs"] = self.top_logprobs
        return asked


class CompletionRequest(_Sampled):
    """One prompt or several, of text or of tokens, and how to go on with each."""

    prompt: (
        str
        | Annotated[list[_Token], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=_Prompts)]
        | Annotated[list[Annotated[list[_Token], Field(min_length=1)]], Field(min_length=1, max_length=_Prompts)]
    )
    add_special_tokens: bool = True
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def prompts(self) -> Sequence[str | list[int]]:
        """Each prompt by itself."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens = [token for token in self.prompt if isinstance(token, int)]
        return [tokens] if tokens else [prompt for prompt in self.prompt if not isinstance(prompt, int)]

    def sampling(self) -> Mapping[str, object]:
        """What the engine needs to know, under its own names; what the client left open is left to the engine."""
        asked = super().sampling()
        return asked if self.logprobs is None else {**asked, "logprobs": self.logprobs}


class TokenizeTextRequest(_Body):
    """A text to be shown as tokens."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: Literal[False] = False


class TokenizeChatRequest(_Chat):
    """A chat to be shown as tokens."""

    add_special_tokens: Literal[False] = False
    return_token_strs: Literal[False] = False


def _form(value: Any) -> str:
    return "chat" if isinstance(value, dict) and "messages" in value else "text"


TokenizeRequest = Annotated[
    Annotated[TokenizeChatRequest, Tag("chat")] | Annotated[TokenizeTextRequest, Tag("text")], Discriminator(_form)
]


class DetokenizeRequest(_Body):
    """Tokens to be shown as text."""

    tokens: list[_Token]
