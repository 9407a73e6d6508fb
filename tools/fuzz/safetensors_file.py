"""Files of features that anybody may have written, held against the library that defines the format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random
from typing import Any, Final

import safetensors

from semel.core import Digest, Feature
from semel.errors import InvalidRequest
from semel.interchange.safetensors import Empty, Entry, FeatureEntry, read, write
from tests.wire.examples import digest_of, feature_of_rows, same
from tools.fuzz.mutation import edited, edited_text
from tools.fuzz.oracle import bounded, check_message, expect

_LENGTH_BYTES: Final = 8
_BOUND_BYTES: Final = 1 << 20
_METADATA: Final = "__metadata__"
_WORDS: Final[tuple[Any, ...]] = (
    *("BOOL", "U8", "I64", "F16", "BF16", "F32", "F64", "F8_E4M3", "image", "audio", "semel", _METADATA),
    *(digest_of(1).hex(), f"{digest_of(1).hex()}/pixel_values", f"{digest_of(2).hex()}/image_grid_thw", "dtype"),
    *("shape", "data_offsets", "token_ids", "mask", "modality", [0, 0], [0, 8], [], {}, {"dtype": "U8", "shape": [0]}),
)


def run(data: bytes) -> None:
    try:
        with bounded(_BOUND_BYTES):
            entries = read(memoryview(data))
    except InvalidRequest as error:
        check_message(error)
        return
    given = {entry.digest: entry.feature for entry in entries if isinstance(entry, FeatureEntry)}
    _check_library(data, given)
    _check_round_trip(given)
    _check_names(entries)


def _check_library(data: bytes, given: Mapping[Digest, Feature]) -> None:
    """A file that both read, both read alike."""
    try:
        theirs: dict[str, Any] = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError:
        return
    for digest, feature in given.items():
        for name, tensor in feature.tensors.items():
            found = theirs[f"{digest.hex()}/{name}"]
            expect(
                tuple(found["shape"]) == tensor.shape, f"{name} is {tensor.shape}, the library reads {found['shape']}"
            )
            expect(bytes(found["data"]) == bytes(tensor.data), f"{name} has other bytes than the library reads")


def _check_round_trip(given: Mapping[Digest, Feature]) -> None:
    again = read(memoryview(b"".join(write(given))))
    expect(len(again) == len(given), f"{len(given)} items were written, {len(again)} read")
    for entry in again:
        expect(isinstance(entry, FeatureEntry | Empty), f"{entry!r} was written")
        if isinstance(entry, FeatureEntry):
            expect(same(entry.feature, given[entry.digest]), f"{entry.digest!r} comes out changed")


def _check_names(entries: list[Entry]) -> None:
    digests = [entry.digest for entry in entries if isinstance(entry, FeatureEntry | Empty)]
    expect(len(digests) == len(set(digests)), "an item stands twice in a file")


def mutate(data: bytes, random: Random) -> bytes | None:
    """Edit the header, or what stands in it as JSON in JSON, as the tree that it is; the length is put right."""
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    try:
        header = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
        if random.random() < 0.3:
            rest = json.loads(header[_METADATA]["semel"])
            header[_METADATA]["semel"] = json.dumps(edited(rest, random, _WORDS), default=str)
            text = json.dumps(header)
        else:
            text = json.dumps(edited(header, random, _WORDS), default=str)
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    if random.random() < 0.1:
        text = edited_text(text, random, ["{", "}", '"', ",", "NaN", "\\ud800", " "])
    head = text.encode(errors="replace")
    return len(head).to_bytes(_LENGTH_BYTES, "little") + head + data[_LENGTH_BYTES + length :]


def seeds() -> Mapping[str, bytes]:
    """Files with none, one and two features, and one with an item that has no tensors."""
    features = [{digest_of(number): feature_of_rows(number) for number in range(1, count + 1)} for count in range(3)]
    empty = json.dumps({_METADATA: {"semel": json.dumps({digest_of(3).hex(): {}})}}).encode()
    return {f"features-{len(some)}": b"".join(write(some)) for some in features} | {
        "empty-item": len(empty).to_bytes(_LENGTH_BYTES, "little") + empty
    }
