"""Alternates between the two sides, and alternates which side goes first. Pure, except for the work that it calls.

So a slow second of the machine is slow for both, and neither side always comes after the other.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from semel.lab.bench.timing import without_garbage_collection

__all__ = ["Pair", "order", "take_turns"]

_Side = TypeVar("_Side")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Pair(Generic[_Side]):
    """The same thing on either side."""

    semel: _Side
    vllm: _Side


def order(turn: int) -> tuple[str, str]:
    """Return which side goes first and second in a round: A B, B A, A B, …"""
    return ("vllm", "semel") if turn % 2 == 0 else ("semel", "vllm")


async def take_turns(
    sides: Pair[_Side],
    work: Callable[[_Side, int], Awaitable[_Result]],
    *,
    turns: int,
    on_turn: Callable[[], None] = lambda: None,
) -> Pair[list[_Result]]:
    """Let both sides do the same work `turns` times. Returns the results by round."""
    results: dict[str, list[_Result]] = {"semel": [], "vllm": []}
    with without_garbage_collection():
        for turn in range(turns):
            for name in order(turn):
                results[name].append(await work(getattr(sides, name), turn))
            on_turn()
    return Pair(results["semel"], results["vllm"])
