"""Cohere's embeddings: the request of `/v2/embed` as vLLM has it, and its response. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, NotRequired, Self

import msgspec
import pybase64
from pydantic import Field, model_validator
from typing_extensions import TypedDict

from semel.core import FLOAT_BYTES
from semel.errors import InvalidRequest
from semel.frontend.api.pooling.requests import MAX_INPUTS, POOLING_REFUSED, PoolingInput
from semel.frontend.api.pooling.responses import write_array
from semel.frontend.api.shared.request_base import Int64, OpenModel, RequestBody, Tokens
from semel.render import ChatRequest

__all__ = [
    "CohereEmbedRequest",
    "CohereEmbeddings",
    "EmbeddingType",
    "EmbeddingsByType",
    "encode_by_type",
    "response_bytes_by_type",
]

EmbeddingType = Literal["float", "binary", "ubinary", "base64"]

_BITS: Final = 8
_BYTES_OF_NUMBER: Final[Mapping[EmbeddingType, float]] = {"float": 26, "binary": 5 / 8, "ubinary": 5 / 8, "base64": 5.4}
"""In JSON, at most, for each number of a vector."""


class _Url(OpenModel):
    url: Annotated[str, Field(min_length=1)]


class _Content(OpenModel):
    """A text or an image of an input."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: _Url | None = None


class _MixedInput(OpenModel):
    """Texts and images that have one embedding."""

    content: Annotated[list[_Content], Field(fail_fast=True, min_length=1)]


_Many = Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)


class CohereEmbedRequest(RequestBody):
    """Texts, images, or inputs of both, and how to write their embeddings."""

    refused: ClassVar[Mapping[str, tuple[tuple[object, ...], str]]] = POOLING_REFUSED

    input_type: Annotated[str, Field(max_length=256)] | None = None
    texts: Annotated[list[str], _Many] | None = None
    images: Annotated[list[str], _Many] | None = None
    inputs: Annotated[list[_MixedInput], _Many] | None = None
    output_dimension: Tokens | None = None
    embedding_types: Annotated[list[EmbeddingType], Field(min_length=1, max_length=4)] | None = None
    truncate: Literal["NONE", "START", "END"] = "END"
    max_tokens: Tokens | None = None
    priority: Int64 = 0

    @model_validator(mode="after")
    def _check_inputs(self) -> Self:
        if sum(one is not None for one in (self.texts, self.images, self.inputs)) != 1:
            raise InvalidRequest("send one of texts, images and inputs")
        return self

    @property
    def types(self) -> list[EmbeddingType]:
        """The forms in which each embedding is written."""
        return [*dict.fromkeys(self.embedding_types or ("float",))]

    @property
    def has_images(self) -> bool:
        """Return whether any input has an image."""
        contents = (content for one in self.inputs or () for content in one.content)
        return self.images is not None or any(content.type == "image_url" for content in contents)

    def params(self) -> dict[str, object]:
        """Return the engine's pooling parameters."""
        dimensions = {} if self.output_dimension is None else {"dimensions": self.output_dimension}
        return {"task": "embed", **dimensions}

    def prompts(self, instructions: Mapping[str, str]) -> Iterable[PoolingInput]:
        """The prompts, each made when it is asked for. With an instruction for their type all are chats, and it is the
        system's message."""
        instruction = self._instruction(instructions)
        if self.texts is not None and instruction is None:
            return self.texts
        contents: Iterable[list[dict[str, Any]]]
        if self.texts is not None:
            contents = ([{"type": "text", "text": text}] for text in self.texts)
        elif self.images is not None:
            contents = ([{"type": "image_url", "image_url": {"url": url}}] for url in self.images)
        else:
            contents = ([_part(content) for content in one.content] for one in self.inputs or ())
        system = [] if instruction is None else [{"role": "system", "content": [{"type": "text", "text": instruction}]}]
        return (
            ChatRequest([*system, {"role": "user", "content": content}], add_generation_prompt=False)
            for content in contents
        )

    def _instruction(self, instructions: Mapping[str, str]) -> str | None:
        if self.input_type is None:
            return None
        if self.input_type not in instructions:
            known = f"one of {', '.join(sorted(instructions))}" if instructions else "nothing: it has no instructions"
            raise InvalidRequest.of("input_type", f"the model does not know it; send {known}")
        return instructions[self.input_type] or None


class EmbeddingsByType(TypedDict):
    """All embeddings, in each form that was requested."""

    float: NotRequired[list[list[float]]]
    binary: NotRequired[list[list[int]]]
    ubinary: NotRequired[list[list[int]]]
    base64: NotRequired[list[str]]


class _ApiVersion(TypedDict):
    version: Literal["2"]


class _BilledUnits(TypedDict):
    input_tokens: int
    image_tokens: int


class _Meta(TypedDict):
    api_version: _ApiVersion
    billed_units: _BilledUnits


class CohereEmbeddings(TypedDict):
    """The embeddings of all inputs."""

    id: str
    embeddings: EmbeddingsByType
    texts: NotRequired[list[str]]
    meta: _Meta
    response_type: Literal["embeddings_by_type"]


def response_bytes_by_type(vectors: Sequence[bytes], types: Sequence[EmbeddingType]) -> int:
    """Return how many bytes the vectors take in a response, at most."""
    numbers = sum(map(len, vectors)) // FLOAT_BYTES
    return sum(int(numbers * _BYTES_OF_NUMBER[kind]) for kind in types) + 8 * len(vectors) * len(types)


def encode_by_type(vectors: Sequence[bytes], types: Sequence[EmbeddingType]) -> Iterator[bytes]:
    """Yield the pieces of the vectors in JSON, in each of these forms."""
    if any(kind in ("binary", "ubinary") for kind in types) and len(vectors[0]) % (FLOAT_BYTES * _BITS):
        raise InvalidRequest.of(
            "embedding_types", f"binary needs a multiple of 8 numbers, and there are {len(vectors[0]) // FLOAT_BYTES}"
        )
    for number, kind in enumerate(types):
        yield b'%b"%b":' % (b"," if number else b"{", kind.encode())
        yield from write_array((_encoded(one, kind),) for one in vectors)
    yield b"}"


def _encoded(vector: bytes, kind: EmbeddingType) -> bytes:
    if kind == "base64":
        return b'"' + pybase64.b64encode(vector) + b'"'
    numbers = array("f", vector)
    if kind == "float":
        return msgspec.json.encode(numbers.tolist())
    signs = int("".join("1" if number >= 0 else "0" for number in numbers), 2).to_bytes(len(numbers) // _BITS, "big")
    return msgspec.json.encode([byte - 128 for byte in signs] if kind == "binary" else list(signs))


def _part(content: _Content) -> dict[str, Any]:
    if content.type == "text":
        return {"type": "text", "text": content.text}
    return {"type": "image_url", "image_url": None if content.image_url is None else {"url": content.image_url.url}}
