"""A running engine with encoder outputs that were fetched for its requests: loaded instead of encoded, and given back.

What is fetched here are the bytes that the same engine has saved before it was made to forget everything. Run by hand
and every night: CI starts no engine for it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from semel.core import Digest, Form, PrefetchedOutput, Submission
from semel.engine.protocol import StagedOutput
from semel.engine.tier_events import Reset
from semel.engine.vllm.tier.host import HostTier
from semel.errors import InvalidRequest
from semel.render import Rendered
from tests.engine.engines import Engines, ShippedRig, Start
from tests.engine.families import FAMILIES
from tests.engine.parity import Answer, draw_image, image_part, joined, submission
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(600)]

START = Start("qwen2-vl", FAMILIES["qwen2-vl"].start.flags, tier_bytes=8 << 20, staging_bytes=4 << 20)


@dataclass(frozen=True)
class Fetched:
    """An engine that knows nothing of a picture, and what another one has made of it."""

    rig: ShippedRig
    tier: HostTier
    rendered: Rendered
    digest: Digest
    form: Form
    content: bytes
    answer: Answer

    def stage(self, form: Form | None = None, content: bytes | None = None) -> StagedOutput:
        staged = self.tier.stage(self.digest, form or self.form)
        assert staged is not None
        left = memoryview(self.content if content is None else content)
        for buffer in staged.buffers:
            buffer[:] = left[: len(buffer)]
            left = left[len(buffer) :]
        return staged

    def submission(self, prefetched: PrefetchedOutput, **sampling: object) -> Submission:
        return replace(submission(self.rendered, **sampling), prefetched_outputs=(prefetched,))

    async def ask(self, prefetched: PrefetchedOutput) -> Answer:
        stream = await self.rig.engine.submit(self.submission(prefetched))
        try:
            return joined([output async for output in stream])
        finally:
            await stream.close()

    async def is_given_back(self) -> None:
        def nothing_is_out() -> bool:
            self.tier.review()
            return self.tier.staged_blocks == 0

        await until(nothing_is_out)


@pytest.fixture
async def fetched(engines: Engines) -> AsyncIterator[Fetched]:
    rig = await engines.of(START)
    tier = rig.engine.tier
    assert tier is not None
    if tier.identity is None:
        await rig.engine.warm()
    rendered = await rig.render([{"role": "user", "content": [image_part(draw_image(np.random.default_rng(4)))]}])
    answer = await rig.answer(rendered)
    (item,) = rendered.prompt.items
    cached_output = tier.cached_output(item.digest)
    assert cached_output is not None
    content = b"".join(cached_output.buffers)
    assert cached_output.is_intact()
    await rig.engine.reset()
    assert not cached_output.is_intact()
    assert Reset(new_weights=False) in tier.review()
    assert not tier.holds(item.digest)
    yield Fetched(rig, tier, rendered, item.digest, cached_output.form, content, answer)
    await rig.engine.reset()


async def test_an_engine_that_is_warm_says_what_its_encoder_is(engines: Engines) -> None:
    rig = await engines.of(START)
    tier = rig.engine.tier
    assert tier is not None
    probes = []
    for _ in range(2):
        await rig.engine.warm()
        assert (tier.epoch, tier.has_new_weights) == (0, False)
        assert set(rig.engine.capabilities.values()) == {"proven"}
        probes.append((tier.identity, tier.probe))
    assert probes[0] == probes[1]
    assert all(one is not None and len(one) == 32 for one in probes[0])


async def test_what_was_fetched_is_not_encoded_and_the_answer_is_the_same(fetched: Fetched) -> None:
    before = await fetched.rig.totals()
    assert await fetched.ask(fetched.stage().prefetched) == fetched.answer
    await fetched.is_given_back()
    after = await fetched.rig.totals()
    assert after.planned - before.planned == after.tier_prefetched - before.tier_prefetched == 1, "nothing was encoded"
    assert after.tier_prefetched_bytes - before.tier_prefetched_bytes == len(fetched.content)
    adopted = fetched.tier.cached_output(fetched.digest)
    assert adopted is not None
    assert b"".join(adopted.buffers) == fetched.content
    assert adopted.is_intact()


async def test_the_control_other_bytes_give_another_answer(fetched: Fetched) -> None:
    noise = np.random.default_rng(1).standard_normal(len(fetched.content) // 4).astype(np.float32)
    assert (await fetched.ask(fetched.stage(content=noise.tobytes()).prefetched)).logprobs != fetched.answer.logprobs


@pytest.mark.parametrize("name", ["ec_transfer_params", "kv_transfer_params"])
async def test_where_outputs_come_from_is_not_a_frontends_to_say_S26(fetched: Fetched, name: str) -> None:
    with pytest.raises(InvalidRequest, match="extra_args"):
        await fetched.rig.engine.submit(submission(fetched.rendered, extra_args={name: {"arrivals": []}}))
