"""Positions for M-RoPE in vLLM's worker processes, also for prompts in which no text follows an item.

vLLM 0.32 counts a token after each item of Qwen3-Omni. If the prompt ends there, or the next item begins, its numbers
do not agree, and that ends the engine for everybody (docs/project/upstream.md). Here such a prompt is computed with the
tokens that it lacks, whose positions are then left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

__all__ = ["allow_bare_items"]

_TEXT = 0


def allow_bare_items(model: Any) -> None:
    """Let a model with M-RoPE take prompts in which no text follows an item."""
    compute = getattr(model, "get_mrope_input_positions", None)
    if compute is None:
        return

    def compute_with_text(input_tokens: Sequence[int], mm_features: Sequence[Any]) -> tuple[Any, int]:
        try:
            found: tuple[Any, int] = compute(input_tokens, mm_features)
        except RuntimeError:
            ends = _bare_ends(len(input_tokens), mm_features)
            if not ends:
                raise
            positions, _ = compute(*_with_text(input_tokens, mm_features, ends))
            added = {end + index for index, end in enumerate(ends)}
            kept = positions[:, [index for index in range(positions.shape[1]) if index not in added]]
            return kept, int(kept.max()) + 1 - len(input_tokens)
        return found

    model.get_mrope_input_positions = compute_with_text


def _bare_ends(length: int, features: Sequence[Any]) -> list[int]:
    """Return where an item ends and the next one, or nothing, begins; in order."""
    places = sorted((feature.mm_position for feature in features), key=lambda place: place.offset)
    starts = [(place.offset + place.length, following.offset) for place, following in pairwise(places)]
    starts += [(place.offset + place.length, length) for place in places[-1:]]
    return [end for end, start in starts if end == start]


def _with_text(token_ids: Sequence[int], features: Sequence[Any], ends: Sequence[int]) -> tuple[list[int], list[Any]]:
    tokens = list(token_ids)
    for end in reversed(ends):
        tokens.insert(end, _TEXT)
    moved = [copy(feature) for feature in features]
    for feature in moved:
        place = feature.mm_position
        feature.mm_position = replace(place, offset=place.offset + sum(end <= place.offset for end in ends))
    return tokens, moved
