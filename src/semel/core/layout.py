"""Layouts: the tokens that replace an item's one placeholder token, and which of them take an embedding.

A layout is kept as runs: images repeat one token a thousand times. A frontend keeps the layouts of every item that its
workers announce: as runs most of them take 150 bytes, as Python integers 20,000. Token ids and mask are expanded when
they are asked for. Equal layouts have equal runs, so they are compared and hashed without being expanded.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise, repeat
from operator import eq, ne
from typing import Final, Literal, Self

from semel.core.prompt import Item, Mask, Placeholder, Prompt, Timeline

__all__ = ["TOKEN_BYTES", "Assembly", "AssemblyKind", "Layout", "pack_token_ids", "unpack_token_ids"]

TOKEN_BYTES: Final = 4
_CACHED_MASKS: Final = 256
_MAX_CACHED_TOKENS: Final = 1 << 15


class Layout:
    """The token ids that replace an item's one placeholder token, and the embedding mask over them. Immutable."""

    __slots__ = ("_length", "mask_runs", "nbytes", "num_embeds", "token_runs")

    token_runs: bytes
    """int32 pairs, little endian: a token, and how many times it repeats. Neighbours differ."""

    mask_runs: bytes | None
    """int32, little endian: alternating counts of positions without and with an embedding, starting without."""

    num_embeds: int
    """Number of embeddings that the encoder must produce."""

    nbytes: int
    """Size of the runs in bytes."""

    def __init__(self, token_ids: Sequence[int], mask: Mask | None = None) -> None:
        if mask is not None and len(mask) != len(token_ids):
            raise ValueError(f"a layout of {len(token_ids)} tokens cannot have a mask over {len(mask)}")
        self._length = len(token_ids)
        self.token_runs = pack_token_ids([number for start, end in _runs(token_ids) for number in (start, end)])
        self.mask_runs = None if mask is None else _mask_runs(mask.bits)
        self.num_embeds = self._length if mask is None else mask.count
        self.nbytes = len(self.token_runs) + len(self.mask_runs or b"")

    @classmethod
    def of_runs(cls, token_runs: bytes, mask_runs: bytes | None = None, *, max_tokens: int) -> Self:
        """Return the layout of runs that somebody sent; raises ValueError if they are broken or too many."""
        numbers = unpack_token_ids(token_runs)
        tokens, counts = numbers[::2], numbers[1::2]
        lengths = [] if mask_runs is None else unpack_token_ids(mask_runs)
        if len(tokens) != len(counts) or min(chain(counts, lengths[1:]), default=1) < 1 or min(lengths, default=0) < 0:
            raise ValueError("the runs of a layout are broken")
        length = sum(counts)
        if max(length, sum(lengths)) > max_tokens:
            raise ValueError(f"a layout has {length:,} tokens, at most {max_tokens:,} are taken")
        if mask_runs is not None and sum(lengths) != length:
            raise ValueError(f"a layout of {length:,} tokens cannot have a mask over {sum(lengths):,}")
        if any(map(eq, tokens, tokens[1:])) or lengths == [0]:
            raise ValueError("a layout came in more runs than it has: equal layouts must have equal runs")
        layout = cls.__new__(cls)
        layout._length = length
        layout.token_runs, layout.mask_runs = token_runs, mask_runs
        layout.num_embeds = length if mask_runs is None else sum(lengths[1::2])
        layout.nbytes = len(token_runs) + len(mask_runs or b"")
        return layout

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids, expanded: about 5 µs for an image."""
        numbers = unpack_token_ids(self.token_runs)
        if len(numbers) == 2:
            return (numbers[0],) * numbers[1]
        return tuple(chain.from_iterable(map(repeat, numbers[::2], numbers[1::2])))

    @property
    def mask(self) -> Mask | None:
        """Return which positions take an embedding; None means all. Those asked for lately are one object."""
        if self.mask_runs is None:
            return None
        return (_cached_mask if self._length <= _MAX_CACHED_TOKENS else _mask_of)(self.mask_runs)

    def __len__(self) -> int:
        return self._length

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Layout):
            return NotImplemented
        return self.token_runs == other.token_runs and self.mask_runs == other.mask_runs

    def __hash__(self) -> int:
        return hash((self.token_runs, self.mask_runs))

    def __repr__(self) -> str:
        return f"Layout({len(self)} tokens, {self.num_embeds} embeddings)"


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as bytes: int32, little endian. Raises ValueError for one that is no int32."""
    try:
        packed = array("i", token_ids)
    except OverflowError as error:
        raise ValueError(f"a token id is no int32: {error}") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_token_ids(token_ids: bytes | memoryview) -> list[int]:
    """Return the token ids in bytes; raises ValueError if they are not whole."""
    if len(token_ids) % TOKEN_BYTES:
        raise ValueError(f"{len(token_ids)} bytes are no int32 token ids")
    packed = array("i")
    packed.frombytes(token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


def _runs(values: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield each value with how many times it repeats: 30 ns a value, where `itertools.groupby` takes 60."""
    changes = bytes(map(ne, values, values[1:]))
    starts = [0] if values else []
    at = changes.find(1)
    while at >= 0:
        starts.append(at + 1)
        at = changes.find(1, at + 1)
    for start, end in pairwise([*starts, len(values)]):
        yield values[start], end - start


def _mask_runs(bits: bytes) -> bytes:
    lengths = [count for _, count in _runs(bits)]
    return pack_token_ids([0, *lengths] if bits[:1] == b"\x01" else lengths)


def _mask_of(mask_runs: bytes) -> Mask:
    lengths = unpack_token_ids(mask_runs)
    return Mask(b"".join((b"\x01" if index % 2 else b"\x00") * length for index, length in enumerate(lengths)))


_cached_mask = lru_cache(_CACHED_MASKS)(_mask_of)


AssemblyKind = Literal["splice", "apply"]
"""The way in which items of a modality enter a prompt.

`splice`: an item's layout replaces one placeholder token, and nothing else changes. `apply`: the model has rules of its
own, and its processor applies them: a placeholder of several tokens or none, or text that changes around an item.
"""


@dataclass(frozen=True, slots=True)
class Assembly:
    """The tokens of a prompt without its items, and the places of the items in them."""

    token_ids: Sequence[int]
    places: Sequence[tuple[int, int]]
    """In the order of the prompt: which item of the request, and how many of the tokens stand before it."""

    def prompt(self, items: Sequence[Item], layouts: Sequence[Layout]) -> Prompt:
        """The prompt with the layout of each item at its place; raises ValueError if an item has none or several."""
        if sorted(index for index, _ in self.places) != [*range(len(items))]:
            raise ValueError(f"{len(items)} items have {len(self.places)} places")
        token_ids: list[int] = []
        placeholders: list[Placeholder] = []
        copied = 0
        for index, before in self.places:
            if not copied <= before <= len(self.token_ids):
                raise ValueError(f"item {index} is after {before} tokens: out of order, or behind the end")
            layout = layouts[index]
            token_ids += self.token_ids[copied:before]
            placeholders.append(Placeholder(len(token_ids), len(layout), layout.mask))
            token_ids += layout.token_ids
            copied = before
        token_ids += self.token_ids[copied:]
        return Prompt(token_ids, Timeline.decoder(placeholders), tuple(items[index] for index, _ in self.places))
