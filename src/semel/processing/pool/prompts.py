"""Prompts on their way to a pool process and back, as bytes: token ids packed, each distinct layout once, as runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from semel.core import Assembly, Layout, Modality, pack_token_ids, unpack_token_ids
from semel.errors import ProtocolError
from semel.processing.pool.pipe import Assembled
from semel.wire.layout_runs import to_layouts, to_runs
from semel.wire.messages import Runs

__all__ = ["decode_prompt", "encode_prompt", "payload_of_assembly", "to_assembled", "to_assembly"]


class _Prompt(msgspec.Struct, frozen=True, array_like=True):
    token_ids: bytes
    items: tuple[tuple[Modality, int], ...]
    """In the order of the request: the modality, and which layout."""

    layouts: tuple[Runs, ...]


_decoder: Final = msgspec.msgpack.Decoder(_Prompt)


def encode_prompt(token_ids: Sequence[int], items: Sequence[tuple[Modality, Layout]]) -> bytes:
    """Return the payload of an order to assemble a prompt."""
    numbers: dict[Layout, int] = {}
    numbered = tuple((modality, numbers.setdefault(layout, len(numbers))) for modality, layout in items)
    return msgspec.msgpack.encode(_Prompt(pack_token_ids(token_ids), numbered, tuple(map(to_runs, numbers))))


def decode_prompt(payload: bytes) -> tuple[list[int], list[tuple[Modality, Layout]]]:
    """Return the prompt in such a payload: its text, and its items."""
    try:
        prompt = _decoder.decode(payload)
        layouts = to_layouts(prompt.layouts)
        return unpack_token_ids(prompt.token_ids), [(modality, layouts[number]) for modality, number in prompt.items]
    except (msgspec.MsgspecError, IndexError, ValueError) as error:
        raise ProtocolError("a pool process got what is not a prompt") from error


def to_assembled(item: int, assembly: Assembly) -> Assembled:
    """Return what to say of an assembled prompt."""
    return Assembled(item, len(assembly.token_ids), len(assembly.places))


def payload_of_assembly(assembly: Assembly) -> bytes:
    """Return the payload that goes with it."""
    return pack_token_ids([*assembly.token_ids, *(number for place in assembly.places for number in place)])


def to_assembly(assembled: Assembled, payload: memoryview) -> Assembly:
    """Return the assembled prompt in a payload."""
    numbers = unpack_token_ids(bytes(payload))
    token_ids, rest = numbers[: assembled.tokens], numbers[assembled.tokens :]
    return Assembly(token_ids, list(zip(rest[::2], rest[1::2], strict=True)))
