"""Requests that are pooled: texts, tokens or chats, under OpenAI's and vLLM's names, and how to write the numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, Self, cast

from pydantic import Field, WithJsonSchema, model_validator

from semel.core import PoolingTask
from semel.errors import InvalidRequest
from semel.frontend.api.openai.requests import check_processor_options
from semel.frontend.api.openai.structured_outputs import check_json
from semel.frontend.api.shared.fields import REFUSED, Ignored
from semel.frontend.api.shared.media_options import MediaIo
from semel.frontend.api.shared.request_base import Int64, OwnedRequest, RequestName, Token, Tokens
from semel.render import MESSAGE, ChatRequest

__all__ = [
    "MAX_INPUTS",
    "POOLING_REFUSED",
    "ClassificationRequest",
    "EmbeddingRequest",
    "Encoding",
    "PooledRequest",
    "PoolingInput",
    "PoolingRequest",
    "ScoreInput",
    "ScorePart",
]

MAX_INPUTS: Final = 2_048
"""Maximum number of inputs of one request, as of OpenAI's."""

MAX_TEMPLATE_CHARS: Final = 1_048_576

POOLING_REFUSED: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    **{name: refused for name, refused in REFUSED.items() if name != "add_special_tokens"},
    "data": ((), "plug-ins that read requests are not run; send input or messages"),
    "normalize": ((), "use use_activation"),
    "padding": (("do_not_pad",), "prompts are not padded"),
}
"""Fields that are refused by name, as in `REFUSED`."""

ScorePart = str | list[dict[str, Any]]
"""A query or a document: a text, or parts with media."""


@dataclass(frozen=True, slots=True)
class ScoreInput:
    """A prompt of contents without a chat template: a query or a document, or for a cross-encoder both."""

    chat: ChatRequest
    """Messages whose roles are `query` and `document`."""

    has_pair: bool


PoolingInput = str | list[int] | ChatRequest | ScoreInput
"""One prompt to pool."""

_Message = Annotated[dict[str, Any], WithJsonSchema(dict(MESSAGE))]
_Chat = Annotated[list[_Message], Field(fail_fast=True, min_length=1)]
_Chats = Annotated[list[_Chat], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
_TokenPrompt = Annotated[list[Token], Field(fail_fast=True, min_length=1)]
_Input = (
    str
    | _TokenPrompt
    | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
    | Annotated[list[_TokenPrompt], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
    | _Chat
    | _Chats
)


@dataclass(frozen=True, slots=True)
class Encoding:
    """The form of vectors in a response."""

    form: Literal["float", "base64"] = "float"
    dtype: Literal["float32", "float16"] = "float32"
    is_big_endian: bool = False


class PooledRequest(OwnedRequest, Ignored):
    """A request of a model that pools."""

    refused: ClassVar[Mapping[str, tuple[tuple[object, ...], str]]] = POOLING_REFUSED

    request_id: RequestName | None = None
    priority: Int64 = 0
    use_activation: bool | None = None
    mm_processor_kwargs: dict[str, Any] = Field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    media_io_kwargs: MediaIo | None = None

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.mm_processor_kwargs:
            check_processor_options(self.mm_processor_kwargs)
        if self.chat_template_kwargs:
            check_json([self.chat_template_kwargs], "chat_template_kwargs", max_chars=MAX_TEMPLATE_CHARS)
        return self

    def params(self, task: PoolingTask) -> dict[str, object]:
        """Return the engine's pooling parameters, without those that the client left out."""
        activation = {} if self.use_activation is None else {"use_activation": self.use_activation}
        return {"task": task, **activation}

    def chat_of(
        self, messages: Sequence[object], *, add_generation_prompt: bool = False, continue_final_message: bool = False
    ) -> ChatRequest:
        """Return the parts of one chat that determine its prompt."""
        return ChatRequest(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
            mm_processor_kwargs=self.mm_processor_kwargs,
            media_io_kwargs=None if self.media_io_kwargs is None else self.media_io_kwargs.options(),
        )


class ClassificationRequest(PooledRequest):
    """Prompts: texts, tokens, or chats, of which one or several are either field."""

    input: _Input | None = None
    messages: _Chat | _Chats | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False

    @model_validator(mode="before")
    @classmethod
    def _check_count(cls, body: Any) -> Any:
        """Refuse too many inputs, in one sentence: the error of a field that takes several types has one for each."""
        for name in ("input", "messages"):
            value = body.get(name) if isinstance(body, dict) else None
            if isinstance(value, list) and len(value) > MAX_INPUTS and isinstance(value[0], str | list):
                raise InvalidRequest.of(name, f"{len(value):,} inputs; the limit is {MAX_INPUTS:,}: send them in parts")
        return body

    @model_validator(mode="after")
    def _check_input(self) -> Self:
        if (self.input is None) is (self.messages is None):
            raise InvalidRequest.of("input", "send either input or messages, and one of the two")
        if self.add_special_tokens and not isinstance(next(iter(self.inputs())), str):
            raise InvalidRequest.of(
                "add_special_tokens", "only with texts: the chat template writes the special tokens"
            )
        return self

    def inputs(self) -> Iterable[PoolingInput]:
        """The prompts, in order, each made when it is asked for: thousands of chats take milliseconds."""
        value = self.messages if self.input is None else self.input
        if isinstance(value, str):
            return [value]
        assert value is not None
        first = value[0]
        if isinstance(first, int):
            return [cast("list[int]", value)]
        if isinstance(first, dict):
            return [self._chat(value)]
        if isinstance(first, list) and isinstance(first[0], dict):
            return (self._chat(cast("list[object]", messages)) for messages in value)
        return cast("list[str | list[int]]", value)

    def _chat(self, messages: Sequence[object]) -> ChatRequest:
        return self.chat_of(
            messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )


class EmbeddingRequest(ClassificationRequest):
    """Prompts, and how to write their embeddings."""

    encoding_format: Literal["float", "base64"] = "float"
    embed_dtype: Literal["float32", "float16"] = "float32"
    endianness: Literal["native", "big", "little"] = "native"
    dimensions: Tokens | None = None

    @property
    def encoding(self) -> Encoding:
        """The form of its vectors."""
        return Encoding(self.encoding_format, self.embed_dtype, self.endianness == "big")

    def params(self, task: PoolingTask) -> dict[str, object]:
        """Return the engine's pooling parameters, without those that the client left out."""
        dimensions = {} if self.dimensions is None else {"dimensions": self.dimensions}
        return {**super().params(task), **dimensions}


class PoolingRequest(EmbeddingRequest):
    """Prompts, and which of the model's tasks is meant: the one that it is served for."""

    task: str | None = None
