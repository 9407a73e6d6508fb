"""Items in vLLM's JSON form: msgpack in base64, tensor by tensor. Pure: text in, tensors out.

An item is a map from field name to `{"data": [dtype, shape, bytes], "field": ...}`, and the bytes are an extension of
type 3. vLLM's own reader calls the factory that `field` names, and reads types 1 and 2 as pickles. This reader skips
`field` and accepts no type but 3 (threats S10). A tensor must have exactly as many bytes as its shape requires (S9).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct
from msgspec.msgpack import Decoder, Ext

from semel.core import Tensor
from semel.errors import InvalidRequest, MediaTooLarge
from semel.wire.limits import MAX_TENSORS, Limits

__all__ = ["read_item"]

_RAW: Final = 3
_MAX_BYTES: Final = Limits().max_feature_bytes


class _Element(Struct, frozen=True):
    """One tensor of an item. vLLM's other keys are ignored."""

    data: tuple[
        Annotated[str, Meta(max_length=16)],
        Annotated[tuple[Annotated[int, Meta(ge=0, le=(1 << 31) - 1)], ...], Meta(max_length=16)],
        Ext,
    ]


_DECODER: Final = Decoder(
    Annotated[dict[Annotated[str, Meta(max_length=128)], _Element], Meta(min_length=1, max_length=MAX_TENSORS)]
)


def read_item(text: str) -> Mapping[str, Tensor]:
    """Return the tensors of an item by name; raises `InvalidRequest` if the text is not an item."""
    if len(text) // 4 * 3 > _MAX_BYTES + 65_536:
        raise MediaTooLarge(f"an item has {len(text) // 4 * 3:,} bytes, a feature may have {_MAX_BYTES:,}: send less")
    try:
        packed = base64.b64decode(text, validate=True)
    except ValueError:
        raise InvalidRequest("it is not valid base64") from None
    try:
        elements = _DECODER.decode(packed)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        raise InvalidRequest("it is not msgpack of tensors by name, as vLLM's render route writes it") from None
    return {name: _tensor(name, element) for name, element in elements.items()}


def _tensor(name: str, element: _Element) -> Tensor:
    dtype, shape, packed = element.data
    if packed.code != _RAW:
        raise InvalidRequest(f"{name!a} is of the type {packed.code}; only plain bytes (3) are read, never a pickle")
    try:
        return Tensor(dtype, shape, memoryview(packed.data).toreadonly())
    except ValueError as error:
        raise InvalidRequest(f"{name!a} is no tensor: {ascii(str(error))[1:-1]}") from None
