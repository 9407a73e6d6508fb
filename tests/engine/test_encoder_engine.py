"""semel's encoder plug-ins and lazy transfer inside a running vLLM: the same answers, no faults, exact counts.

Stock vLLM gives the answers that the others are held to. The encoder cache has room for a few pictures only, so it has
to make room all the time; the KV cache of the preempting engines has room for a few requests. Engines "in full" send
every item to their worker processes as vLLM does (`--disable-lazy-mm-transfer`).
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from semel.engine.vllm.compat.internals import LAZY_TRANSFER_SCHEDULER, LAZY_TRANSFER_WORKER, encoder_arguments
from semel.engine.vllm.plugins.encoder_metrics import EncoderPage, EncoderTotals
from semel.engine.vllm.tier.shared_file import create_file, descriptor_path
from semel.lab.bench.stepping import Kind

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

MAX_ITEM_TOKENS = 36
STEP_TOKENS = 96
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
Tokens = tuple[int, ...]
stock_answers: dict[str, Tokens] = {}


@dataclass(frozen=True)
class Asked:
    """A request, and whether it is aborted after its first token."""

    name: str
    prompt: dict[str, Any]
    is_aborted: bool = False
    priority: int = 0
    max_tokens: int = 8
    seed: int | None = None
    """Of a request whose tokens are drawn; without one it is greedy."""


@dataclass(frozen=True)
class Running:
    """An engine, and the page that its encoder cache writes."""

    kind: Kind
    llm: Any
    page: EncoderPage
    preempts: bool = False
    ships: bool = False
    has_tier: bool = False
    seen: list[EncoderTotals] = field(default_factory=list)
    """The totals at every token that came."""

    @property
    def totals(self) -> EncoderTotals:
        return self.page.read().get(0, EncoderTotals())

    async def answer(self, asked: Asked) -> Tokens | None:
        from vllm.sampling_params import SamplingParams

        temperature = 0.0 if asked.seed is None else 1.0
        params = SamplingParams(temperature=temperature, seed=asked.seed, max_tokens=asked.max_tokens, ignore_eos=True)
        tokens: Tokens = ()
        async for output in self.llm.generate(asked.prompt, params, asked.name, priority=asked.priority):
            tokens = tuple(output.outputs[0].token_ids)
            self.seen.extend(self.page.read().values())
            if asked.is_aborted:
                return None
        return tokens

    async def catch_up(self) -> None:
        """Wait for the step after the last answer, which writes the page: the core steps between two calls to it."""
        await self.llm.is_sleeping()
        await self.llm.is_sleeping()

    async def answers(self, requests: list[Asked]) -> dict[str, Tokens]:
        """All of them at once; those that were not aborted."""
        tokens = await asyncio.gather(*map(self.answer, requests))
        return {asked.name: got for asked, got in zip(requests, tokens, strict=True) if got is not None}


LITTLE_MEMORY = {
    "scheduling_policy": "priority",
    "block_size": 32,
    "num_gpu_blocks_override": 36,
    "scheduler_reserve_full_isl": False,
    "long_prefill_token_threshold": 24,
}
# vLLM 0.32 dies of preemption with it: it drops the pixels of items that the prefix cache covers, for good.
NO_PREFIXES = {"enable_prefix_caching": False}


ENGINES = ["stock", "planning, preempting, tier"]
PREEMPTING = ["cache, preempting", "planning, preempting"]
"""In CI two configurations of `tools/engine/matrix.py` plan and preempt, without a tier."""

NIGHTLY = [
    "stock, again",  # the answers that the others are held against
    "cache",
    "cache, tier",
    "planning",
    *PREEMPTING,
    *(f"{name}, in full" for name in PREEMPTING),
    "cache, preempting, tier, in full",
]
TIER_BYTES = 120 * 512
"""Room for half of a dozen pictures, of 512 bytes an embedding."""


@pytest.fixture(
    scope="module",
    params=[*ENGINES, *(pytest.param(name, marks=[pytest.mark.slow, pytest.mark.nightly]) for name in NIGHTLY)],
)
async def running(request: pytest.FixtureRequest, tiny: Callable[[str], Path]) -> AsyncIterator[Running]:
    kind, *ways = request.param.split(", ")
    ships, preempts, has_tier = kind != "stock" and "in full" not in ways, "preempting" in ways, "tier" in ways
    arguments = {
        "max_num_batched_tokens": STEP_TOKENS,
        "max_model_len": 1_024,
        "mm_processor_kwargs": {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * MAX_ITEM_TOKENS}},
        "limit_mm_per_prompt": {"image": 8, "video": 0},
        **(LITTLE_MEMORY if preempts else {}),
        **({} if ships or not preempts else NO_PREFIXES),
    }
    async for started in start(kind, tiny("qwen2-vl"), ships=ships, has_tier=has_tier, **arguments):
        yield replace(started, preempts=preempts)


async def start(
    kind: Kind, model: Path, *, ships: bool, has_tier: bool = False, **arguments: Any
) -> AsyncIterator[Running]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from semel.engine.vllm.arguments import create_config
    from semel.engine.vllm.tier.config import TierConfig

    page, region = EncoderPage.create(), create_file("semel-tier")
    plugged = encoder_arguments({"metrics": page.path}, with_scheduler=kind == "planning", with_lazy_transfer=ships)
    if has_tier:
        plugged |= TierConfig(TIER_BYTES, descriptor_path(region)).arguments
        plugged.setdefault("scheduler_cls", LAZY_TRANSFER_SCHEDULER)
    common = {"enforce_eager": True, "dtype": "float32", "seed": 0, "disable_log_stats": True}
    engine_args = AsyncEngineArgs(model=str(model), **common, **arguments, **({} if kind == "stock" else plugged))
    llm = AsyncLLM.from_vllm_config(create_config(engine_args), disable_log_stats=True)
    try:
        assert kind == "stock" or ships == (llm.vllm_config.parallel_config.worker_cls == LAZY_TRANSFER_WORKER)
        yield Running(kind, llm, page, ships=ships, has_tier=has_tier)
    finally:
        await asyncio.to_thread(llm.shutdown)
        page.close()
        os.close(region)


def pictures(rng: np.random.Generator, count: int) -> list[Image.Image]:
    sides = rng.integers(2, 7, (count, 2)) * 28
    return [Image.fromarray(rng.integers(0, 256, (h, w, 3), dtype=np.uint8)) for h, w in sides]


def prompt(images: list[Image.Image], words: int) -> dict[str, Any]:
    text = f"<|im_start|>user\n{IMAGE * len(images)}{'what is in this picture ? ' * words}<|im_end|>\n"
    parts = {"prompt": f"{text}<|im_start|>assistant\n"}
    return {**parts, "multi_modal_data": {"image": images}} if images else parts


def random_requests(seed: int, count: int, *, priorities: int = 1) -> list[Asked]:
    """Requests over a dozen pictures: duplicates in a request and between requests, some long, a tenth aborted."""
    rng, pool = random.Random(seed), pictures(np.random.default_rng(seed), 12)
    return [
        Asked(
            f"{seed}.{number}",
            prompt(rng.choices(pool, k=rng.randint(0, 5)), words=rng.choice([1, 4, 30])),
            is_aborted=rng.random() < 0.1,
            priority=rng.randrange(priorities),
        )
        for number in range(count)
    ]


def seeded_requests() -> list[Asked]:
    """Requests whose tokens are drawn; each prompt fits into a step."""
    return [Asked(f"seed {number}", prompt([], words=4 + number % 4), seed=number // 2) for number in range(24)]


async def test_two_hundred_random_requests_are_answered_as_by_stock_vllm(running: Running) -> None:
    answers = await running.answers(random_requests(0, 200))
    assert len(answers) > 150
    assert len(set(answers.values())) > 0.7 * len(answers)
    if running.kind == "stock":
        stock_answers.update(answers)
        stock_answers.update(await running.answers(random_requests(1, 120)))
        return
    assert stock_answers.keys() >= answers.keys(), "the stock engine has to run first"
    assert [name for name in answers if answers[name] != stock_answers[name]] == []
    totals = running.totals
    assert totals.evictions > 0
    assert totals.resident <= totals.capacity == STEP_TOKENS
    assert (min(totals.tier_loads, totals.tier_saves, totals.tier_evictions) > 0) == running.has_tier
    assert totals.tier_held_bytes <= totals.tier_capacity_bytes <= running.has_tier * TIER_BYTES


async def test_b7_priorities_and_little_memory_do_no_harm(running: Running) -> None:
    if not running.preempts:
        pytest.skip("this engine preempts nobody")
    answers = await running.answers(random_requests(0, 200, priorities=4))
    assert [name for name in answers if answers[name] != stock_answers[name]] == []
    assert running.totals.cut > 0


async def test_an_engine_that_preempts_and_evicts_brings_back_what_it_left_out(running: Running) -> None:
    """With prefix caching, and with priorities; stock vLLM ends when it is preempted so."""
    if not (running.preempts and running.ships):
        pytest.skip("this engine leaves nothing out, or preempts nobody")
    first = await running.answers(random_requests(1, 120, priorities=4))
    second = await running.answers([replace(asked, name=f"again {asked.name}") for asked in random_requests(1, 120)])
    totals = running.totals
    assert {name: first[name] for name in first if first[name] != stock_answers[name]} == {}
    assert [name for name in second if second[name] != stock_answers[name.removeprefix("again ")]] == []
    assert min(totals.evictions, totals.left_out_bytes, totals.late_bytes) > 0


async def test_seeded_requests_in_chunks_are_answered_as_by_stock_vllm_alone(running: Running) -> None:
    """In company their prompts are computed in chunks, of which vLLM's own worker dies on a CPU; each of them alone is
    computed in one step, and there stock vLLM draws the same."""
    if running.kind == "stock":
        for asked in seeded_requests():
            stock_answers.update(await running.answers([asked]))
        return
    if not running.ships:
        pytest.skip("this engine has vLLM's own worker")
    answers = await running.answers([*random_requests(2, 40), *seeded_requests()])
    seeded = {asked.name: answers[asked.name] for asked in seeded_requests()}
    assert [name for name in seeded if seeded[name] != stock_answers[name]] == []
    assert len(set(seeded.values())) > 20, "seeds and prompts make a difference"


async def test_totals_after_a_known_sequence_are_the_known_counts(running: Running) -> None:
    """Of pictures that the tier had before the reset, none comes from there."""
    if running.kind == "stock":
        pytest.skip("for engines that count")
    await running.llm.reset_encoder_cache()
    await running.catch_up()
    before = running.totals
    # 36 embeddings each; two of them fit beside one another, and the third has to push one out.
    a, b, c = (
        Image.fromarray(np.random.default_rng(seed).integers(0, 256, (168, 168, 3), dtype=np.uint8))
        for seed in (7, 8, 9)
    )
    for number, images in enumerate([[a], [a, a], [b], [c], [c], [a]]):
        await running.llm.reset_prefix_cache()
        await running.answer(Asked(f"known {number}", prompt(images, words=1), max_tokens=1))
    await running.catch_up()
    after = running.totals
    counts = {
        name: getattr(after, name) - getattr(before, name)
        for name in ("queries", "hits", "planned", "evictions", "tier_saves", "tier_loads")
    }
    tier = {"tier_saves": 3, "tier_loads": 1} if running.has_tier else {"tier_saves": 0, "tier_loads": 0}
    assert counts == {"queries": 7, "hits": 3, "planned": 4, "evictions": 2, **tier}
    assert (after.resident, after.reclaimable, after.capacity) == (72, 72, STEP_TOKENS)
    assert (after.planning_ns > before.planning_ns) == (running.kind == "planning")


async def transcribe_and_count(running: Running) -> None:
    """Twelve clips at once through an encoder cache with room for two."""
    start_tokens = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
    rng = np.random.default_rng(0)
    clips = [rng.normal(0, 0.3, 16_000).astype(np.float32) for _ in range(12)]
    prompts = [{"prompt": start_tokens, "multi_modal_data": {"audio": (clip, 16_000)}} for clip in clips]
    requests = [Asked(f"clip {number}", asked, max_tokens=20) for number, asked in enumerate(prompts)]
    await running.catch_up()
    before = running.totals
    answers = await running.answers(requests)
    await running.catch_up()
    last = running.totals
    assert len(answers) == 12
    assert all(0 <= totals.resident <= totals.capacity == 3_200 for totals in running.seen)
    counts = tuple(getattr(last, name) - getattr(before, name) for name in ("queries", "hits", "planned"))
    assert (*counts, last.resident) == (12, 0, 12, 0)
