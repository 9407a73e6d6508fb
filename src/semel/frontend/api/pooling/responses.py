"""Responses with what was pooled, in the shapes of OpenAI's and vLLM's servers. Pure.

A response may have millions of numbers, so it is written as pieces, a few thousand numbers each, and never stands in
memory as Python's floats: `response_bytes` says beforehand how long it can get. Whoever writes it in a thread holds the
interpreter's lock for one piece at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    "write_array",
    "write_list",
    "write_member",
]

_FLOAT_CHARS: Final = 26
"""Of a float32 in JSON, which has it as a double, with a comma."""

_ENTRY_BYTES: Final = 256
_SLICE_BYTES: Final = 24_576
"""Of a vector that is written at once, in about 0.5 ms; a multiple of 3, which base64 can be cut at, and of 8."""


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


def encode_vector(shape: tuple[int, ...], data: bytes, encoding: Encoding) -> Iterator[bytes]:
    """Yield the pieces of what was pooled in JSON."""
    if encoding.form == "base64":
        yield b'"'
        for start in range(0, len(data), _SLICE_BYTES):
            yield pybase64.b64encode(_converted(data[start : start + _SLICE_BYTES], encoding))
        yield b'"'
        return
    numbers = memoryview(data).cast("f")
    if len(shape) == 1:
        yield from _write_numbers(numbers)
        return
    width = max(shape[-1], 1)
    yield from write_array(_write_numbers(numbers[start : start + width]) for start in range(0, len(numbers), width))


def write_list(head: Mapping[str, Any], entries: Iterable[Iterable[bytes]], name: str = "data") -> Iterator[bytes]:
    """Yield the pieces of an object with these members, and the entries, in JSON already, under a name."""
    yield from write_member(head, name, write_array(entries))


def write_member(members: Mapping[str, Any], name: str, value: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the pieces of an object with these members, and one more whose value is in JSON already."""
    yield msgspec.json.encode(members)[:-1]
    yield b',"%b":' % name.encode()
    yield from value
    yield b"}"


def write_array(entries: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Yield the pieces of an array whose entries are in JSON already."""
    yield b"["
    for number, pieces in enumerate(entries):
        if number:
            yield b","
        yield from pieces
    yield b"]"


def _write_numbers(numbers: memoryview[float]) -> Iterator[bytes]:
    size = _SLICE_BYTES // FLOAT_BYTES
    slices = (numbers[start : start + size].tolist() for start in range(0, len(numbers), size))
    yield from write_array((msgspec.json.encode(one)[1:-1],) for one in slices)


def _converted(data: bytes, encoding: Encoding) -> bytes:
    order = ">" if encoding.is_big_endian else "<"
    if encoding.dtype == "float32" and not encoding.is_big_endian:
        return data
    code = "f" if encoding.dtype == "float32" else "e"
    return struct.pack(f"{order}{len(data) // FLOAT_BYTES}{code}", *memoryview(data).cast("f"))
