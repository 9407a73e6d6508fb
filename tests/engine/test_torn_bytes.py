"""Features in shared memory on the real engine: a slot is used again only when the engine's transport has let go of it.

vLLM sends tensors without copying them, and may still be reading when the request has long been aborted. If a slot
were used again before, another item's bytes would be stored under the digest, and answers would be wrong for good.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest

from semel.cache import SharedCache
from semel.core import Digest, Feature, Submission
from semel.errors import FeatureMissing
from semel.render import ChatRequest, Rendered
from tests.engine.engines import Engines, Start
from tests.engine.parity import GREEDY, Answer, Rig, draw_image, image_part, joined

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SLOTS, PICTURES, ABORTED, BURST = 3, 40, 2_000, 5
SLOT_BYTES = 400 * 1_176 + 64
"""Of a picture of 280 by 280: more than a socket takes at once."""


SIZE = {"shortest_edge": 28 * 28 * 4, "longest_edge": 280 * 280}
START = Start(
    "qwen2-vl",
    (
        *("--max-model-len", "2048", "--limit-mm-per-prompt", '{"image": 4, "video": 0}'),
        *("--mm-processor-cache-gb", f"{12.5 * SLOT_BYTES / 2**30:.12f}"),
        *("--mm-processor-kwargs", json.dumps({"size": SIZE})),
    ),
    processor="vllm",
)
"""Its features come from vLLM's processor, with options for it."""


@pytest.fixture
async def rig(engines: Engines) -> Rig:
    return await engines.of(START)


async def stored(cache: SharedCache, digest: Digest, feature: Feature) -> Feature:
    """The feature in shared memory, as soon as there is room."""
    for _ in range(10_000):
        if (shared := cache.put(digest, feature)) is not feature:
            return shared
        await asyncio.sleep(0.001)  # the transport reads all slots: it is another process's turn
    raise AssertionError("a slot never came back")


async def answered(rig: Rig, number: int, prompt: Rendered, cache: SharedCache) -> Answer:
    """By reference if possible, and else from shared memory."""
    ((digest, feature),) = prompt.features.items()
    given = {} if rig.engine.holds(digest) else {digest: await stored(cache, digest, feature)}
    stream = await rig.engine.submit(Submission(f"asked-{number}", prompt.prompt, given, GREEDY))
    return joined([output async for output in stream])


@contextmanager
def engine_core_stopped(rig: Rig) -> Iterator[None]:
    """Nothing that is sent meanwhile is read before the end, beyond what the socket takes."""
    (process,) = rig.llm.engine_core.resources.engine_manager.processes
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


async def abort_at_once(rig: Rig, prompts: list[Rendered], cache: SharedCache) -> int:
    """Submit and abort each; how many travelled out of shared memory."""
    travelled = 0
    for prompt in prompts:
        ((digest, feature),) = prompt.features.items()
        shared = cache.put(digest, feature)  # the feature itself if all slots are still being read
        travelled += shared is not feature and not rig.engine.holds(digest)
        stream = await rig.engine.submit(Submission("aborted", prompt.prompt, {digest: shared}, GREEDY))
        del shared
        await stream.close()
    return travelled


async def test_2000_aborted_requests_over_three_slots_of_shared_memory_tear_no_answer(rig: Rig) -> None:
    rng, choice = np.random.default_rng(0), random.Random(0)
    chats = [[{"role": "user", "content": [image_part(draw_image(rng, side=280))]}] for _ in range(PICTURES)]
    prompts = [await rig.pipeline.chat(ChatRequest(chat)) for chat in chats]
    expected = [await rig.answer(prompt) for prompt in prompts]
    assert len({answer.token_ids for answer in expected}) > PICTURES * 0.8
    await rig.engine.reset()
    cache = SharedCache.create(SLOTS * SLOT_BYTES)
    travelled = 0
    for burst in range(ABORTED // BURST):
        with engine_core_stopped(rig) if burst % 2 else nullcontext():
            travelled += await abort_at_once(rig, choice.sample(prompts, BURST), cache)
        if burst % 5 == 1:
            held = [index for index, prompt in enumerate(prompts) if all(map(rig.engine.holds, prompt.features))]
            for index in (held[-1], choice.choice(held), choice.randrange(PICTURES)):
                assert await answered(rig, index, prompts[index], cache) == expected[index], f"torn in burst {burst}"
    assert travelled > ABORTED / 4
    held = [index for index, prompt in enumerate(prompts) if all(map(rig.engine.holds, prompt.features))]
    assert len(held) == 12
    for index in [*held, *range(PICTURES)]:
        assert await answered(rig, index, prompts[index], cache) == expected[index]
    cache.clear()
    gc.collect()
    assert cache.occupied == 0
    cache.close()


async def test_an_item_that_the_engine_lost_can_be_sent_from_where_it_lies(rig: Rig) -> None:
    prompt = await rig.pipeline.chat(
        ChatRequest([{"role": "user", "content": [image_part(draw_image(np.random.default_rng(1), side=280))]}])
    )
    (digest,) = prompt.features
    cache = SharedCache.create(SLOT_BYTES)
    expected = await answered(rig, 0, prompt, cache)
    await rig.llm.engine_core.reset_mm_cache_async()
    with pytest.raises(FeatureMissing):
        await answered(rig, 1, prompt, cache)
    assert await answered(rig, 2, prompt, cache) == expected
    assert cache.get(digest) is not None
    cache.close()
