"""A running engine with encoder outputs that were fetched for its requests: loaded instead of encoded, and given back.

What is fetched here are the bytes that the same engine has saved before it was made to forget everything. The second
engine copies as one on a GPU does, over a device whose copies end late (`late_device`). Run by hand and every night: CI
starts no engine for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from semel.core import Digest, Form, Key, PrefetchedOutput, Submission
from semel.embeddings.nodes import Node, Nodes
from semel.embeddings.sealed import SealedStore
from semel.engine.protocol import StagedOutput
from semel.engine.tier_events import Reset
from semel.engine.vllm.tier.host import HostTier
from semel.errors import InvalidRequest
from semel.render import Rendered
from semel.worker.embedding_sync import EmbeddingSync
from tests.embeddings.redis import Redis, running_redis
from tests.engine.engines import Engines, ShippedRig, Start
from tests.engine.families import FAMILIES
from tests.engine.late_engine import LATE_WORKER
from tests.engine.parity import Answer, draw_image, image_part, joined, submission
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1800)]

START = Start("qwen2-vl", FAMILIES["qwen2-vl"].start.flags, tier_bytes=8 << 20, staging_bytes=4 << 20)
LATE = replace(START, flags=(*START.flags, "--worker-cls", LATE_WORKER), has_own_memory=True)
KEY = Key(bytes(range(32)))


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


@asynccontextmanager
async def syncing(rig: ShippedRig, redis: Redis) -> AsyncIterator[EmbeddingSync]:
    """What a worker does with its store."""
    tier = rig.engine.tier
    assert tier is not None
    nodes = Nodes([Node("redis", redis.store())])
    sync = EmbeddingSync(
        rig.engine,
        tier,
        lambda identity: SealedStore(KEY, identity, nodes, 3_600),
        fetch_s=30,
        publish_after=1,
        ttl_s=3_600,
    )
    publishing = asyncio.create_task(sync.run())
    try:
        await until(lambda: sync._store is not None)
        yield sync
    finally:
        publishing.cancel()
        nodes.close()
        await sync.close()


@pytest.fixture(scope="module", params=[START, LATE], ids=["host", "late device"])
def start(request: pytest.FixtureRequest) -> Start:
    """Of the module, so that each engine starts once."""
    found: Start = request.param
    return found


@pytest.fixture
async def fetched(engines: Engines, start: Start) -> AsyncIterator[Fetched]:
    rig = await engines.of(start)
    tier = rig.engine.tier
    assert tier is not None
    if tier.identity is None:
        await rig.engine.warm()
    rendered = await rig.render([{"role": "user", "content": [image_part(draw_image(np.random.default_rng(4)))]}])
    answer = await rig.answer(rendered)
    (item,) = rendered.prompt.items
    cached_output = await tier.saved_output(item.digest)
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
        states = dict(rig.engine.capabilities)
        assert states.pop("encoder_planning") == "absent", "it is not asked for here"
        assert set(states.values()) == {"proven"}, states
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
    adopted = await fetched.tier.saved_output(fetched.digest)
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


async def test_what_was_published_is_not_encoded_after_a_restart_wherever_the_engine_copies(
    engines: Engines, tmp_path: Path
) -> None:
    """Over a real Redis. The third engine copies as one on a CPU: it reads the same names, under the same seals."""
    rng = np.random.default_rng(5)
    questions = [[{"role": "user", "content": [image_part(draw_image(rng))]}] for _ in range(4)]
    encodes, answers, keys = [], [], []
    with running_redis(tmp_path, is_unix=True) as redis:
        for start in (LATE, LATE, START):
            await engines.close()
            rig = await engines.of(start)
            await rig.engine.warm()
            tier = rig.engine.tier
            assert tier is not None
            async with syncing(rig, redis) as sync:
                before = await rig.totals()
                rendered = [await rig.render(question) for question in questions]
                streams = [await sync.submit(submission(one, max_tokens=1)) for one in rendered]
                answers.append([joined([output async for output in stream]) for stream in streams])
                for one in rendered:
                    assert await tier.saved_output(one.prompt.items[0].digest) is not None
                await sync.drain(30)
                after = await rig.totals()
            loaded = [(one.tier_loads + one.tier_prefetched) for one in (before, after)]
            encodes.append(after.planned - before.planned - (loaded[1] - loaded[0]))
            keys.append(sorted(redis.all_keys()))
    assert encodes == [4, 0, 0]
    assert answers[1:] == [answers[0]] * 2
    assert keys[1:] == [keys[0]] * 2
    assert len(keys[0]) == 1 + 2 * len(questions), "the probe, and a manifest and a chunk of each"
