"""The level `whole`: shipped code under a virtual clock."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from semel.lab.simulate import clock
from semel.lab.simulate.costs import MODELLED
from semel.lab.simulate.engine import EngineLimits, EngineModel, Job, Prompts
from semel.lab.simulate.faults import draw_faults
from semel.lab.simulate.processes import FleetSize
from semel.lab.simulate.whole import Plan, run
from semel.lab.simulate.workload import Ask, Chats, Item, Talks, Traffic, digest_of

SIZE = (308, 308)
SECONDS = 6.0


def workload(rate: float = 6.0) -> Talks:
    script = Chats(turns=4, think_s=1.0, images=30, size=SIZE)
    return Talks(script, Traffic(rate, SECONDS, tenants=2, answer_tokens=8))


def run_json(seed: int) -> str:
    """A run with all that may happen, as the command prints it."""
    faults = draw_faults(Random(f"faults/{seed}"), frontends=3, workers=3, seconds=SECONDS)
    plan = Plan(workload(), FleetSize(3, 3), faults=faults, seed=seed, leaving=0.1)
    return json.dumps(run(plan).json())


def test_time_passes_only_when_nothing_is_left_to_do() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        seen = [loop.time()]
        await asyncio.sleep(3600)
        seen.append(loop.time())
        await asyncio.to_thread(sum, [1, 2])
        return [*seen, loop.time()]

    assert clock.run(main()) == [0.0, 3600.0, 3600.0]


def test_a_run_in_which_everybody_waits_ends_with_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(clock.Stuck, match="nothing is due"):
        clock.run(main())


def test_every_request_is_answered_and_counted_once() -> None:
    figures = run(Plan(workload(), FleetSize(2, 2), seed=1))
    asks = list(workload().asks(Random("1/asks")))
    assert figures.requests == figures.answered == len(asks) > 20
    assert figures.refused == figures.failed_over == 0
    assert figures.items == sum(len(ask.items) for ask in asks) == figures.encodes + figures.encoder_hits
    assert figures.distinct_items <= figures.preprocessed <= figures.features_sent + figures.distinct_items
    assert sum(figures.by_worker.values()) == figures.requests
    assert sum(flow.messages for kind, flow in figures.to_workers.items() if kind == "Submit") == figures.requests


@pytest.mark.slow
def test_the_same_seed_gives_the_same_json_in_processes_with_other_hash_seeds() -> None:
    code = "from tests.simulate.test_whole import run_json; print(run_json(5))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COVERAGE_PROCESS_START": ""}
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**environment, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            check=True,
            timeout=240,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(found) == 1
    (printed,) = found
    assert json.loads(printed)["answered"] > 10


def ask_of(conversation: int, items: tuple[Item, ...], text: int, answer: int = 4) -> Ask:
    return Ask(0.0, "t", conversation, items, text + sum(item.tokens for item in items), answer)


def image(key: int, tokens: int = 64) -> Item:
    return Item(key, 224, 224, tokens, 1000)


def steps(model: EngineModel, ask: Ask, prompts: Prompts, name: str) -> int:
    """Run a request alone; how many tokens its engine had cached."""
    digests = [digest_of(ask.tenant, item.key) for item in ask.items]
    job = Job.of(ask, name, digests, prompts.places(ask))
    model.add(job)
    while (seconds := model.begin()) is not None:
        assert seconds > 0
        model.finish()
    assert job.generated == ask.answer_tokens
    return job.cached


def test_an_engine_has_the_beginning_of_a_later_turn_and_encodes_what_is_new() -> None:
    model, prompts = EngineModel(MODELLED), Prompts()
    first = ask_of(1, (image(1),), 100)
    assert steps(model, first, prompts, "a") == 0
    assert model.encodes == 1
    later = ask_of(1, (image(1), image(2)), 100 + 4 + 60)
    assert steps(model, later, prompts, "b") == (first.prompt_tokens + 4) // 16 * 16
    assert (model.encodes, model.encoder_hits, model.prefix_hits) == (2, 1, 1)
    other = ask_of(2, (image(1),), 100)
    assert steps(model, other, prompts, "c") == 0
    assert (model.encodes, model.encoder_hits) == (2, 2)  # the encoder cache has it
    assert model.residency.free + model.residency.reclaimable == model.residency.capacity


def test_items_that_were_left_out_change_the_prompt_from_its_beginning() -> None:
    model, prompts = EngineModel(MODELLED), Prompts()
    steps(model, ask_of(1, (image(1), image(2)), 100), prompts, "a")
    assert steps(model, ask_of(1, (image(2), image(3)), 164), prompts, "b") <= 100


def test_an_engine_that_has_room_for_one_image_encodes_them_one_after_another() -> None:
    model, prompts = EngineModel(MODELLED, EngineLimits(encoder_embeds=64, max_num_batched_tokens=128)), Prompts()
    steps(model, ask_of(1, tuple(image(key) for key in range(5)), 10), prompts, "a")
    assert model.encodes == 5
    assert model.residency.counts.evictions == 4


def test_an_image_that_can_never_be_encoded_is_refused_at_once() -> None:
    model = EngineModel(MODELLED, EngineLimits(encoder_embeds=63))
    with pytest.raises(ValueError, match="can never be encoded"):
        steps(model, ask_of(1, (image(1),), 10), Prompts(), "a")
