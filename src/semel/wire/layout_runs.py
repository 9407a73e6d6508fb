"""Token ids and layouts as bytes: int32, little endian. A layout is run-length encoded.

Used between frontend and worker, and between a frontend and its preprocessing processes.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import Final

from semel.core import Layout, Mask
from semel.wire.messages import Runs

__all__ = ["TOKEN_BYTES", "layouts_of", "pack_token_ids", "runs_of", "unpack_token_ids"]

TOKEN_BYTES: Final = 4
_MAX_LAYOUT_TOKENS: Final = 1 << 20
_MAX_ANNOUNCED_TOKENS: Final = 1 << 23  # of all layouts in one message: as many as a ledger stores
_MAX_CACHED_TOKENS: Final = 1 << 15
_CACHED_LAYOUTS: Final = 1_024


@lru_cache(_CACHED_LAYOUTS)
def runs_of(layout: Layout) -> Runs:
    """A layout as it is sent."""
    runs: list[int] = []
    for token, group in groupby(layout.token_ids):
        runs += (token, sum(1 for _ in group))
    if layout.mask is None:
        return Runs(pack_token_ids(runs))
    lengths = [0] if layout.mask.bits[:1] == b"\x01" else []  # the first run is without embeddings
    lengths += [sum(1 for _ in group) for _, group in groupby(layout.mask.bits)]
    return Runs(pack_token_ids(runs), pack_token_ids(lengths))


def layouts_of(announced: Sequence[Runs]) -> list[Layout]:
    """The layouts of a message; raises ValueError if they are broken or have too many tokens."""
    sizes = [_num_tokens(runs) for runs in announced]
    if sum(sizes) > _MAX_ANNOUNCED_TOKENS:
        raise ValueError(f"its layouts have {sum(sizes):,} tokens, at most {_MAX_ANNOUNCED_TOKENS:,} are taken")
    return [
        _cached_layout_of(runs) if size <= _MAX_CACHED_TOKENS else _layout_of(runs)
        for runs, size in zip(announced, sizes, strict=True)
    ]


def _num_tokens(runs: Runs) -> int:
    return sum(map(abs, unpack_token_ids(runs.token_ids)[1::2]))


@lru_cache(_CACHED_LAYOUTS)
def _cached_layout_of(runs: Runs) -> Layout:
    return _layout_of(runs)


def _layout_of(runs: Runs) -> Layout:
    numbers = unpack_token_ids(runs.token_ids)
    tokens, counts = numbers[::2], numbers[1::2]
    lengths = [] if runs.mask is None else unpack_token_ids(runs.mask)
    if len(tokens) != len(counts) or min((*counts, *lengths), default=0) < 0:
        raise ValueError("the runs of a layout are broken")
    if max(sum(counts), sum(lengths)) > _MAX_LAYOUT_TOKENS:
        raise ValueError(f"a layout has {sum(counts):,} tokens, at most {_MAX_LAYOUT_TOKENS:,} are taken")
    if runs.mask is not None and sum(lengths) != sum(counts):
        raise ValueError(f"a layout of {sum(counts):,} tokens cannot have a mask over {sum(lengths):,}")
    token_ids = [token for token, count in zip(tokens, counts, strict=True) for _ in range(count)]
    if runs.mask is None:
        return Layout(tuple(token_ids))
    return Layout(tuple(token_ids), Mask(b"".join(bytes([index % 2]) * n for index, n in enumerate(lengths))))


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as bytes."""
    packed = array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_token_ids(token_ids: bytes) -> list[int]:
    """The token ids in bytes; raises ValueError if they are not whole."""
    if len(token_ids) % TOKEN_BYTES:
        raise ValueError(f"{len(token_ids)} bytes are no int32 token ids")
    packed = array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()
