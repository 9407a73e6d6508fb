"""Answers of 128 tokens, streamed and not, one and 16 at a time: serving CPU, context switches and latency of each."""

from __future__ import annotations

from typing import Final

from semel.lab.bench.serving.bench import Bench
from semel.lab.bench.serving.blocks import SERVING, Load, block_rows, measure_blocks
from semel.lab.bench.serving.figures import Row
from semel.lab.bench.serving.images import chat

__all__ = ["ANSWER_TOKENS", "answer_body", "answers"]

ANSWER_TOKENS: Final = 128
_AT_A_TIME: Final = (1, 16)


def answer_body(*, is_streamed: bool) -> bytes:
    """Return a request whose answer has exactly 128 tokens."""
    return chat("What is this?", stream=is_streamed, max_tokens=ANSWER_TOKENS, ignore_eos=True)


async def answers(bench: Bench) -> list[Row]:
    """Measure all four kinds. Of servers that run elsewhere only the latency is known."""
    rows = []
    for name, is_streamed in (("not streamed", False), ("streamed", True)):
        for at_a_time in _AT_A_TIME:
            title = f"{name}, {at_a_time} at a time"
            load = Load(answer_body(is_streamed=is_streamed), at_a_time, at_a_time)
            blocks = await measure_blocks(bench, f"answers, {title}", load, turns=bench.effort.bursts)
            figures = SERVING if bench.is_here else ("latency",)
            rows += block_rows(f"answers: {title}, {{}}", blocks, figures)
    return rows
