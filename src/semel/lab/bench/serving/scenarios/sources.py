"""Two checkouts of semel, one run: what a text, a repeated image, a streamed token and a whole answer cost each.

Blocks are short and many, so that those of a pair see the same machine. The interval of a ratio says what a run can
tell: on a busy machine with two cores it was ±6% for 50 blocks of 40 texts, so a change of 3% takes a quiet one.
"""

from __future__ import annotations

from typing import Final

from semel.lab.bench.serving.bench import Bench
from semel.lab.bench.serving.blocks import Load, block_rows, measure_blocks
from semel.lab.bench.serving.figures import Row
from semel.lab.bench.serving.images import Size, chat, image_part, text_part
from semel.lab.bench.serving.scenarios.answers import ANSWER_TOKENS, answer_body

__all__ = ["sources"]

_WARMING: Final = 4


async def sources(bench: Bench) -> list[Row]:
    """Return rows of both checkouts: `semel` is this one, `vllm` the other."""
    image = image_part(bench.images.draw(Size.SQUARE))
    turns = bench.effort.short_turns
    loads = {
        "text": (Load(chat("What is this?"), 20), turns),
        "repeat": (Load(chat([image, text_part("What is this?")]), 10), turns // 2),
        "token": (Load(answer_body(is_streamed=True), 1, units=ANSWER_TOKENS), turns // 4),
        "whole answer": (Load(answer_body(is_streamed=False), 1), turns // 4),
    }
    rows = []
    for name, (load, turns) in loads.items():
        blocks = await measure_blocks(bench, f"two sources, {name}", load, turns=turns, warming=_WARMING)
        rows += block_rows(f"sources: {{}} of a {name}", blocks)
    return rows
