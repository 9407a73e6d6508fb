"""Cards: can vLLM take an item of which it gets the small tensors only, if the encoder's output can be had?

A spike, run by hand and every night. The item goes into vLLM's item cache under a name of its own, beside the whole
item, with the whole item's identifier, by which vLLM knows encoder outputs and prefixes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from semel.core import Form, PrefetchedOutput
from semel.engine.vllm.plugins.lazy_transfer import _light
from semel.engine.vllm.tier import config as tier_config
from semel.engine.vllm.tier.host import HostTier
from semel.errors import EngineFailed, FeatureRejected
from semel.render import Rendered
from tests.engine.card_tier import CARD, LOST
from tests.engine.engines import ShippedRig, Start, running_as_worker
from tests.engine.families import FAMILIES
from tests.engine.parity import Answer, Chat, draw_image, image_part, joined, submission

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(600)]

Models = Callable[[str], Path]

START = Start("qwen2-vl", FAMILIES["qwen2-vl"].start.flags, tier_bytes=8 << 20, staging_bytes=4 << 20)


@dataclass(frozen=True)
class Spike:
    """An engine that has forgotten a picture, and what it had made of it."""

    rig: ShippedRig
    tier: HostTier
    rendered: Rendered
    form: Form
    content: bytes
    answer: Answer

    def prefetched(self) -> PrefetchedOutput:
        """The encoder's output, as if it had been fetched from the fleet's store."""
        (item,) = self.rendered.prompt.items
        staged = self.tier.stage(item.digest, self.form)
        assert staged is not None
        left = memoryview(self.content)
        for buffer in staged.buffers:
            buffer[:] = left[: len(buffer)]
            left = left[len(buffer) :]
        return staged.prefetched

    async def ask(self, *prefetched_outputs: PrefetchedOutput, name: str = "ours") -> Answer:
        """The answer to a request with a card in the place of its picture."""
        request = replace(submission(self.rendered), request_id=name, prefetched_outputs=prefetched_outputs)
        with cards(self.rig.llm) as sent:
            stream = await self.rig.engine.submit(request)
        assert sent, "the picture was referred to"
        return joined([output async for output in stream])


@contextmanager
def cards(llm: Any) -> Iterator[list[int]]:
    """What goes to the engine core in this block goes without its large tensors; gives the bytes that are left."""
    client, sent = llm.engine_core, []
    add = client.add_request_async

    async def add_cards(request: Any) -> None:
        light = []
        for feature in request.mm_features:
            assert feature.data is not None
            card = replace(_light(feature), mm_hash=CARD + feature.identifier)
            assert "pixel_values" in feature.data
            assert "pixel_values" not in card.data
            sent.append(sum(part.data.nbytes for part in card.data.values()))
            light.append(card)
        request.mm_features = light
        await add(request)

    client.add_request_async = add_cards
    try:
        yield sent
    finally:
        client.add_request_async = add


@asynccontextmanager
async def spike(tiny: Models, monkeypatch: pytest.MonkeyPatch, connector: str) -> AsyncIterator[Spike]:
    monkeypatch.setattr(tier_config, "TIER", connector)
    monkeypatch.setattr(tier_config, "TIER_MODULE", "tests.engine.card_tier")
    async with running_as_worker(START, tiny("qwen2-vl")) as rig:
        tier = rig.engine.tier
        assert tier is not None
        image = draw_image(np.random.default_rng(4), side=420)
        question: Chat = [{"role": "user", "content": [image_part(image), {"type": "text", "text": "what is it ?"}]}]
        rendered = await rig.render(question)
        answer = await rig.answer(rendered)
        cached_output = tier.cached_output(rendered.prompt.items[0].digest)
        assert cached_output is not None
        content = b"".join(cached_output.buffers)
        await rig.engine.reset()
        yield Spike(rig, tier, rendered, cached_output.form, content, answer)


async def test_an_item_without_its_pixels_is_answered_from_its_output(
    tiny: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with spike(tiny, monkeypatch, "CardTier") as engine:
        assert await engine.ask(engine.prefetched()) == engine.answer
        await engine.rig.engine.reset()
        with pytest.raises(EngineFailed):  # the request came with its feature: a frontend sends it again
            await engine.ask(name=LOST)
        assert await engine.rig.answer(engine.rendered) == engine.answer, "only that request has ended"


async def test_the_control_a_card_whose_output_is_lost_runs_the_encoder_without_pixels(
    tiny: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with spike(tiny, monkeypatch, "TrustingCardTier") as engine:
        with pytest.raises(FeatureRejected, match="contradict"):  # semel's guard; vLLM's engine would end
            await engine.ask(name=LOST)
