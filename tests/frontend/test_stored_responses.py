"""Stored responses: continued, read and deleted at any frontend, by their tenant alone; never in an answer's way."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

from semel.render import ChatRenderer
from tests.effort import examples
from tests.frontend.conversing import Life, conversing

LIVES = examples(60)


async def test_in_any_life_a_response_is_what_its_client_was_answered(
    tmp_path: Path, parts_renderer: ChatRenderer
) -> None:
    counts: Counter[str] = Counter()
    async with conversing(tmp_path, parts_renderer) as world:
        for seed in range(LIVES):
            await world.renew()
            life = Life(world, Random(seed))
            try:
                await life.live(40)
            except AssertionError as error:
                error.add_note(f"seed {seed}")
                raise
            counts.update(life.counts)
    assert min(counts[what] for what in ("created", "forked", "found", "unknown", "refused", "deleted")) > LIVES / 4
