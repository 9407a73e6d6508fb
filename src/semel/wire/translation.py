"""Between the values of `semel.core` and messages: prompts and submissions, features and payloads.

Whatever comes from a peer is checked here once, by the constructors of the values themselves; what they refuse is a
`ProtocolError`. Tensor bytes are never copied here.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Final

from semel.core import (
    DTYPE_BYTES,
    Digest,
    Feature,
    Item,
    Layout,
    Mask,
    Placeholder,
    Prompt,
    Tensor,
    Timeline,
)
from semel.errors import ProtocolError
from semel.wire.messages import Payload, Place, Submit, TensorHead

__all__ = ["feature_of", "payload_of", "prompt_of", "sizes_of", "submit_of"]

_TOKEN_BYTES: Final = 4


def submit_of(
    request_id: str,
    prompt: Prompt,
    *,
    sampling: Mapping[str, object],
    cache_salt: str | None = None,
    payloads: Iterable[Digest] = (),
) -> Submit:
    """The message that submits a prompt. `payloads` names the features that will be sent."""
    masks: dict[Mask, int] = {}
    places = tuple(
        Place(
            placeholder.offset,
            placeholder.length,
            item.modality,
            item.digest,
            None if placeholder.mask is None else masks.setdefault(placeholder.mask, len(masks)),
        )
        for placeholder, item in zip(prompt.timeline, prompt.items, strict=True)
    )
    return Submit(
        request_id,
        _pack(prompt.token_ids),
        places,
        tuple(mask.bits for mask in masks),
        dict(sampling),
        cache_salt,
        None if prompt.encoder_token_ids is None else _pack(prompt.encoder_token_ids),
        tuple(payloads),
    )


def prompt_of(submit: Submit) -> Prompt:
    """The prompt that was submitted, checked."""
    timeline = Timeline.decoder if submit.encoder_token_ids is None else Timeline.encoder
    try:
        masks = [Mask(bits) for bits in submit.masks]
        return Prompt(
            _unpack(submit.token_ids),
            timeline(
                Placeholder(place.offset, place.length, None if place.mask is None else masks[place.mask])
                for place in submit.places
            ),
            tuple(Item(place.modality, place.digest) for place in submit.places),
            None if submit.encoder_token_ids is None else _unpack(submit.encoder_token_ids),
        )
    except (IndexError, ValueError) as error:
        raise ProtocolError(f"request {submit.request_id} has a broken prompt: {error}") from error


def payload_of(transfer: int, digest: Digest, feature: Feature) -> Payload:
    """The message that a feature begins with."""
    heads = tuple(TensorHead(name, tensor.dtype, tensor.shape) for name, tensor in feature.tensors.items())
    mask = feature.layout.mask
    return Payload(
        transfer,
        digest,
        feature.modality,
        heads,
        _pack(feature.layout.token_ids),
        None if mask is None else mask.bits,
    )


def sizes_of(payload: Payload) -> list[int]:
    """The bytes of each tensor, as dtype and shape demand; nothing is allocated."""
    if len({head.name for head in payload.tensors}) != len(payload.tensors):
        raise ProtocolError(f"transfer {payload.transfer} names a tensor twice")
    for head in payload.tensors:
        if head.dtype not in DTYPE_BYTES:
            raise ProtocolError(f"tensor {head.name} has the unknown dtype {head.dtype!r}")
    return [DTYPE_BYTES[head.dtype] * prod(head.shape) for head in payload.tensors]


def feature_of(payload: Payload, buffers: Sequence[memoryview]) -> Feature:
    """The feature that a payload announced, over the bytes that came for it."""
    try:
        tensors = {
            head.name: Tensor(head.dtype, head.shape, buffer)
            for head, buffer in zip(payload.tensors, buffers, strict=True)
        }
        mask = None if payload.mask is None else Mask(payload.mask)
        return Feature(payload.modality, tensors, Layout(tuple(_unpack(payload.token_ids)), mask))
    except ValueError as error:
        raise ProtocolError(f"transfer {payload.transfer} is no feature: {error}") from error


def _pack(token_ids: Sequence[int]) -> bytes:
    packed = array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpack(token_ids: bytes) -> list[int]:
    if len(token_ids) % _TOKEN_BYTES:
        raise ValueError(f"{len(token_ids)} bytes are no int32 token ids")
    packed = array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()
