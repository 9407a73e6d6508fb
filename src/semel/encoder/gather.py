"""Slices of encoder outputs that fill the positions of a step (requirement C5).

Library code: vLLM's model runner has no plug point for it. A test compares it with that runner.
"""

from __future__ import annotations

from dataclasses import dataclass

from semel.core import Timeline

__all__ = ["Gathered", "Slice", "gather"]


@dataclass(frozen=True, slots=True)
class Slice:
    """The embeddings `[start, end)` of one input's encoder output."""

    index: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Gathered:
    """The encoder outputs for the positions of one step."""

    slices: tuple[Slice, ...]
    """In the order of the positions that they fill."""
    mask: bytes
    """One byte per position: 1 takes the next embedding of the slices, 0 takes the token's own embedding."""


def gather(timeline: Timeline, start: int, end: int) -> Gathered:
    """Return the embeddings for prompt positions `[start, end)`.

    It reads only the k inputs in the window: O(log n + k), plus the mask. The inputs of an encoder-decoder prompt fill
    no decoder position: an encoder timeline has nothing to gather.
    """
    mask = bytearray(end - start)
    slices: list[Slice] = []
    lo, hi = (0, 0) if timeline.is_encoder else timeline.window(start, end)
    for index in range(lo, hi):
        placeholder = timeline[index]
        offset = placeholder.offset
        first, last = max(0, start - offset), min(placeholder.length, end - offset)
        embeds = placeholder.embed_range(first, last)
        if embeds[0] == embeds[1]:
            continue
        slices.append(Slice(index, *embeds))
        bits = b"\x01" * (last - first) if placeholder.mask is None else placeholder.mask.bits[first:last]
        mask[offset + first - start : offset + last - start] = bits
    return Gathered(tuple(slices), bytes(mask))
