"""Responses with what was pooled, in the shapes of OpenAI's and vLLM's servers. Pure.

A response may have millions of numbers, so it is written as pieces, one for each input, and never stands in memory as
Python's floats: `response_bytes` says beforehand how long it can get.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
import pybase64
from typing_extensions import TypedDict

from semel.core import FLOAT_BYTES
from semel.frontend.api.pooling.requests import Encoding
from semel.frontend.api.shared.usage import Usage

__all__ = [
    "Classification",
    "ClassificationList",
    "Embedding",
    "EmbeddingList",
    "Pooled",
    "PoolingList",
    "encode_vector",
    "response_bytes",
    "write_list",
]

_FLOAT_CHARS: Final = 26
"""Of a float32 in JSON, which has it as a double, with a comma."""

_ENTRY_BYTES: Final = 256


class Embedding(TypedDict):
    """The embedding of one input: numbers, or the base64 of their bytes."""

    index: int
    object: Literal["embedding"]
    embedding: list[float] | str


class EmbeddingList(TypedDict):
    """The embeddings of all inputs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: Usage


class Pooled(TypedDict):
    """What was made of one input: one list of numbers, or one for each token, or the base64 of their bytes."""

    index: int
    object: Literal["pooling"]
    data: list[float | list[float]] | str


class PoolingList(TypedDict):
    """What was made of all inputs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Pooled]
    usage: Usage


class Classification(TypedDict):
    """The classes of one input."""

    index: int
    label: str | None
    """The name of the most probable class, if the model names its classes."""

    probs: list[float]
    num_classes: int


class ClassificationList(TypedDict):
    """The classes of all inputs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classification]
    usage: Usage


def response_bytes(vectors: Sequence[bytes], encoding: Encoding) -> int:
    """Return how many bytes the response with these vectors has at most."""
    nbytes = sum(map(len, vectors))
    written = nbytes * _FLOAT_CHARS // FLOAT_BYTES if encoding.form == "float" else nbytes * 4 // 3
    return written + _ENTRY_BYTES * (1 + len(vectors))


def encode_vector(shape: tuple[int, ...], data: bytes, encoding: Encoding) -> bytes:
    """Return what was pooled as JSON."""
    if encoding.form == "base64":
        return b'"' + pybase64.b64encode(_converted(data, encoding)) + b'"'
    numbers = array("f", data).tolist()
    if len(shape) == 1:
        return msgspec.json.encode(numbers)
    width = max(shape[-1], 1)
    rows = (msgspec.json.encode(numbers[start : start + width]) for start in range(0, len(numbers), width))
    return b"[" + b",".join(rows) + b"]"


def write_list(head: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return the pieces of an object with these members and the entries as `data`, whose vectors are written."""
    pieces = [msgspec.json.encode(head)[:-1], b',"data":[']
    for number, entry in enumerate(entries):
        pieces += [b"," if number else b"", msgspec.json.encode(entry)]
    return [*pieces, b"]}"]


def _converted(data: bytes, encoding: Encoding) -> bytes:
    order = ">" if encoding.is_big_endian else "<"
    if encoding.dtype == "float32" and not encoding.is_big_endian:
        return data
    code = "f" if encoding.dtype == "float32" else "e"
    return struct.pack(f"{order}{len(data) // FLOAT_BYTES}{code}", *array("f", data))
