"""Positions of items in a prompt: masks, placeholders, timelines, prompts.

Every value that a scheduler reads per step is an integer that was computed once (requirements A1-A6). No tensor is
read, and a lookup among 32,768 placeholders is two bisections. A timeline is checked when it is built, and never again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final, Literal, Self, overload

from semel.core.digest import Digest

__all__ = ["Item", "Mask", "Media", "Modality", "Page", "Placeholder", "Prompt", "Timeline"]

Modality = Literal["audio", "image", "video"]

_SHOWN_CHARS: Final = 64


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a document, as it is made an image."""

    number: int
    """Counted from 1."""

    dpi: int


@dataclass(frozen=True, slots=True, repr=False)
class Media:
    """The bytes of one image, clip or video as received, with the type that the request states."""

    modality: Modality
    data: bytes
    mime: str | None = None
    """The type that the sender states. Messages show it; decoding never trusts it."""

    page: Page | None = None
    """The page that is the image, if the bytes are a document's."""

    @property
    def subject(self) -> str:
        """Return what it is, as its client knows it."""
        return f"the {self.modality}" if self.page is None else f"page {self.page.number} of the document"

    @property
    def nbytes(self) -> int:
        """The bytes that it has in memory."""
        return len(self.data)

    def __repr__(self) -> str:
        mime = "unknown type" if self.mime is None else repr(self.mime[:_SHOWN_CHARS])  # a client's text, in a log line
        return f"Media({self.modality}, {mime}, {len(self.data):,} bytes)"


_NEVER: Final = 1 << 62  # past the end of any prompt
_NEIGHBOURS: Final = 4  # average number of placeholders per mark of a timeline's table


class Mask:
    """The positions of a placeholder that take an embedding.

    Immutable, and shared by all placeholders of one layout. The running count is computed once per layout, no matter
    how often requests contain its item.
    """

    __slots__ = ("_counts", "bits")

    bits: bytes
    """One byte per position: 1 takes an embedding, 0 does not."""

    def __init__(self, bits: Iterable[bool | int]) -> None:
        self.bits = bytes(map(bool, bits))
        # A list of ints with a leading 0, so that an edge at index 0 reads 0 and never wraps around (A2, A3).
        self._counts = [0, *accumulate(self.bits)]

    def __len__(self) -> int:
        return len(self.bits)

    @property
    def count(self) -> int:
        """Number of positions that take an embedding."""
        return self._counts[-1]

    def embed_range(self, start: int, end: int) -> tuple[int, int]:
        """Return the range of embeddings for positions `[start, end)`."""
        return self._counts[start], self._counts[end]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and self.bits == other.bits

    def __hash__(self) -> int:
        return hash(self.bits)

    def __repr__(self) -> str:
        return f"Mask({self.count} of {len(self)})"


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A run of prompt positions that one item fills."""

    offset: int
    length: int
    mask: Mask | None = None
    """The positions that take an embedding; None means all."""

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length < 0:
            raise ValueError(f"{self!r} has a negative offset or length")
        if self.mask is not None and len(self.mask) != self.length:
            raise ValueError(f"a placeholder of {self.length} positions cannot have a mask over {len(self.mask)}")

    @property
    def end(self) -> int:
        """The first position after the placeholder."""
        return self.offset + self.length

    @property
    def num_embeds(self) -> int:
        """Number of embeddings that the item provides."""
        return self.length if self.mask is None else self.mask.count

    def embed_range(self, start: int, end: int) -> tuple[int, int]:
        """Return the range of embeddings for positions `[start, end)`, counted from the placeholder's offset."""
        if not 0 <= start <= end <= self.length:
            raise ValueError(f"[{start}, {end}) is not a sub-range of {self!r}")
        return (start, end) if self.mask is None else self.mask.embed_range(start, end)


class Timeline(Sequence[Placeholder]):
    """All placeholders of one prompt, checked and searchable. Immutable; created by `decoder` or `encoder`."""

    __slots__ = ("_ends", "_ends_before", "_offsets", "_offsets_before", "_placeholders", "_shift", "_span")

    def __init__(self, placeholders: tuple[Placeholder, ...], offsets: list[int], ends: list[int]) -> None:
        self._placeholders = placeholders
        self._offsets = offsets
        self._ends = ends
        # A coarse table narrows each search to a few neighbours: 0.5 µs instead of 0.8 for a window among 32,768 items.
        # Its size depends on the number of placeholders, not on their positions, because clients control the positions.
        self._span = ends[-1] if ends else 0
        self._shift = (self._span * _NEIGHBOURS // max(len(ends), 1)).bit_length()
        marks = range(0, self._span + (2 << self._shift), 1 << self._shift)
        self._ends_before = [bisect_right(ends, mark) for mark in marks]
        self._offsets_before = [bisect_left(offsets, mark) for mark in marks]

    @classmethod
    def decoder(cls, placeholders: Iterable[Placeholder]) -> Self:
        """The timeline of an ordinary prompt: sorted by offset, without overlaps. An error names the offending pair."""
        if not (checked := tuple(placeholders)):
            return cls((), [], [])
        for index, (left, right) in enumerate(pairwise(checked)):
            if right.offset < left.offset:
                raise ValueError(f"placeholders {index} and {index + 1} are out of order: {left!r}, then {right!r}")
            if right.offset < left.end:
                raise ValueError(f"placeholders {index} and {index + 1} overlap: {left!r} and {right!r}")
        return cls(checked, [p.offset for p in checked], [p.end for p in checked])

    @classmethod
    def encoder(cls, placeholders: Iterable[Placeholder]) -> Self:
        """Return the encoder side of an encoder-decoder prompt: every item is at offset 0 (A6).

        The positions belong to the encoder, not the decoder. No decoder position is past a placeholder, so a window
        begins at index 0.
        """
        checked = tuple(placeholders)
        for index, placeholder in enumerate(checked):
            if placeholder.offset != 0:
                raise ValueError(f"encoder placeholder {index} must be at offset 0: {placeholder!r}")
        return cls(checked, [0] * len(checked), [_NEVER] * len(checked))

    def window(self, start: int, end: int) -> tuple[int, int]:
        """Return the indices `(lo, hi)` of the placeholders that overlap positions `[start, end)`, in O(log n) (A5)."""
        if start >= self._span:
            return len(self._ends), len(self._ends)
        if start < 0 or end < 0:  # before the prompt: a shift by marks would wrap around
            return self.window(max(start, 0), max(end, 0))
        before, mark = self._ends_before, start >> self._shift
        lo = bisect_right(self._ends, start, before[mark], before[mark + 1])
        if end > self._span:
            return lo, len(self._ends)
        before, mark = self._offsets_before, end >> self._shift
        hi = bisect_left(self._offsets, end, before[mark], before[mark + 1])
        return (lo, hi) if hi > lo else (lo, lo)

    def followed_by(self, placeholders: Iterable[Placeholder]) -> Timeline:
        """A decoder timeline with more placeholders appended, for prompts that grow. Checks only the new ones."""
        more = Timeline.decoder((*self._placeholders[-1:], *placeholders))
        known = len(self._placeholders[-1:])
        return Timeline(
            self._placeholders + more[known:], self._offsets + more._offsets[known:], self._ends + more._ends[known:]
        )

    @property
    def is_encoder(self) -> bool:
        """Return whether the positions belong to the encoder, not the decoder (A6)."""
        return self._ends[:1] == [_NEVER]

    @property
    def end(self) -> int:
        """The first position after all placeholders."""
        if not self._placeholders:
            return 0
        considered = self._placeholders if self.is_encoder else self._placeholders[-1:]
        return max((placeholder.end for placeholder in considered), default=0)

    def __len__(self) -> int:
        return len(self._placeholders)

    @overload
    def __getitem__(self, index: int) -> Placeholder: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Placeholder, ...]: ...
    def __getitem__(self, index: int | slice) -> Placeholder | tuple[Placeholder, ...]:
        return self._placeholders[index]

    def __iter__(self) -> Iterator[Placeholder]:
        return iter(self._placeholders)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Timeline) and (self._placeholders, self._ends) == (other._placeholders, other._ends)

    def __hash__(self) -> int:
        return hash(self._placeholders)

    def __repr__(self) -> str:
        return f"Timeline({len(self)} placeholders, {sum(p.num_embeds for p in self)} embeddings)"


@dataclass(frozen=True, slots=True)
class Item:
    """One image, clip or video at one position of one prompt; the timeline has the position."""

    modality: Modality
    digest: Digest


@dataclass(frozen=True, slots=True, repr=False)
class Prompt:
    """A rendered prompt: its tokens, and for each placeholder of the timeline the item that fills it."""

    token_ids: Sequence[int]
    timeline: Timeline
    items: tuple[Item, ...]
    encoder_token_ids: Sequence[int] | None = None
    """The encoder's tokens of an encoder-decoder prompt; the timeline then refers to them."""

    def __post_init__(self) -> None:
        if len(self.items) != len(self.timeline):
            raise ValueError(f"{len(self.items)} items for {len(self.timeline)} placeholders")
        side = self.token_ids if self.encoder_token_ids is None else self.encoder_token_ids
        if self.timeline.end > len(side):
            raise ValueError(f"the last placeholder ends at {self.timeline.end}, the prompt at {len(side)}")

    def __repr__(self) -> str:
        return f"Prompt({len(self.token_ids)} tokens, {len(self.items)} items)"
