"""A run from its start to its page: the reference first, then the fleet under fire."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import aiohttp

from semel.errors import ServiceError
from semel.lab.bench.report import describe_machine
from semel.lab.prove.answers import References, ask_references
from semel.lab.prove.bare import running_bare
from semel.lab.prove.driver import Balancer, Driver
from semel.lab.prove.faults import Faults
from semel.lab.prove.images import ImageServer, serving_images
from semel.lab.prove.page import Page
from semel.lab.prove.plan import (
    BARE_REFUSALS,
    MODEL_REFUSALS,
    REFUSALS,
    TENANTS,
    Ask,
    Media,
    Mix,
    Question,
    bodies,
    draw_image,
    draw_questions,
    plan,
)
from semel.lab.prove.processes import Node
from semel.lab.prove.work import Recorder
from semel.lab.prove.world import Shape, World, post, running_world, upload
from semel.telemetry import metrics
from semel.telemetry.scrape import Scrape

__all__ = ["Options", "found_made", "prove"]

_PROGRESS_S: Final = 2.0
_ANSWER_S: Final = 300.0
_NEW: Final = 4

Tell = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of a run."""

    shape: Shape
    mix: Mix
    fault_interval_s: float = 5.0
    """0: none."""

    at_a_time: int = 12
    references: Path | None = None
    """A file with the table of reference answers: read if it is there, else written."""


async def prove(options: Options, tell: Tell) -> Page:
    """Run it; the page of what was found."""
    refusals = (BARE_REFUSALS if options.shape.is_bare else REFUSALS) + (
        MODEL_REFUSALS if options.shape.has_engines else ()
    )
    mix = replace(options.mix, refusals=refusals)
    images = [draw_image(mix.seed, number) for number in range(mix.images)]
    async with serving_images(images) as server:
        references = await _references(replace(options, mix=mix), server, tell)
        server.fetches = 0
        tell("starting the fleet", 0, mix.requests)
        async with running_world(options.shape, server) as world:
            files = {} if options.shape.is_bare else await upload(world.fleet.urls[0], world.keys, images)
            media = Media(images, server.url, files)
            return await _drive(world, replace(options, mix=mix), media, references, server, tell)


async def _references(options: Options, images: ImageServer, tell: Tell) -> References:
    """Return the table of answers: of a file, or asked of a bare server; without engines, of a fleet of one worker."""
    mix, shape, path = options.mix, options.shape, options.references
    made_by = f"{shape.model.name} {shape.engine_flags} {shape.has_engines} {mix.seed} {mix.images}"
    if path is not None and path.exists():
        return References.read(path, made_by)
    questions, media = draw_questions(mix), Media(images.images)
    tell("asking the reference", 0, len(questions))
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        if shape.has_engines:
            bare = running_bare(shape.model, shape.engine_flags)
            node = await asyncio.to_thread(bare.__enter__)
            try:
                found = await ask_references(partial(post, session, node.url), questions, media)
            finally:
                await asyncio.to_thread(bare.__exit__, None, None, None)
        else:
            async with running_world(replace(shape, frontends=1, workers=1, without=""), images) as world:
                send = partial(post, session, world.fleet.urls[0], key=world.keys[TENANTS[0]])
                found = await ask_references(send, questions, media, TENANTS[0], is_bare=False)
    if path is not None:
        found.write(path, made_by)
    return found


async def _drive(
    world: World, options: Options, media: Media, references: References, images: ImageServer, tell: Tell
) -> Page:
    """Send all requests while faults are made."""
    mix = options.mix
    recorder = Recorder(world.fleet)
    faults = Faults(world, recorder, seed=mix.seed, interval_s=options.fault_interval_s)
    is_bare = options.shape.is_bare
    balancer = Balancer(lambda: world.fleet.urls, world.probe)
    driver = Driver(balancer, references, media, world.keys, at_a_time=options.at_a_time, is_bare=is_bare)
    background = [asyncio.create_task(recorder.run()), asyncio.create_task(_tell(driver, mix.requests, tell))]
    firing = asyncio.create_task(faults.run() if options.fault_interval_s else asyncio.sleep(0))
    try:
        tally = await driver.run(plan(mix))
        firing.cancel()
        tell("waiting for the last processes", mix.requests, mix.requests)
        await faults.finish()
    finally:
        faults.cancel()
        for task in (firing, *background):
            task.cancel()
        await asyncio.gather(firing, *background, return_exceptions=True)
    await recorder.read_all()
    tally.faults += faults.failures
    try:
        frontend = world.fleet.running_frontends[0]
        preprocessed = partial(_preprocessed, frontend)
        made_for_others = 0 if is_bare else await found_made(frontend.url, world.keys, mix, preprocessed)
    except (ServiceError, aiohttp.ClientError, OSError) as error:
        tally.outcomes["failed"] += 1
        tally.faults.append(f"a request after the last fault: {error!r}"[:500])
        made_for_others = 0
    return Page(
        run=_describe(options),
        host=describe_machine(),
        tally=tally,
        work=recorder.total(),
        broken=len(faults.failures),
        found_made=made_for_others,
        memory=recorder.memory,
        faults=faults.counts,
        fetched_from_server=images.fetches,
        questions=len(draw_questions(mix)),
        ties=len(references.ties),
    )


async def found_made(url: str, keys: Mapping[str, str], mix: Mix, preprocessed: Callable[[], float]) -> int:
    """Count new items that a tenant finds made for another one: two ask a frontend about the same new images."""
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    media = Media([draw_image(mix.seed, mix.images + number) for number in range(_NEW)])
    before = await asyncio.to_thread(preprocessed)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for number, tenant in enumerate(TENANTS[:2] * _NEW):
            ask = Ask(number, tenant, Question("what is new?", (number // 2,)))
            ((path, body),) = bodies(ask, media)
            await post(session, url, path, body, keys[tenant])
    return 2 * _NEW - int(await asyncio.to_thread(preprocessed) - before)


def _preprocessed(frontend: Node) -> float:
    return Scrape.parse(frontend.metrics()).total(metrics.POOL_PROCESSED)


def _describe(options: Options) -> dict[str, str | int | float]:
    shape, mix = options.shape, options.mix
    return {
        "requests": mix.requests,
        "seed": mix.seed,
        "frontends": shape.frontends,
        "workers": shape.workers,
        "transport": shape.transport,
        "engines": "vLLM" if shape.has_engines else "without a model",
        "against": "bare vLLM with two API servers" if shape.is_bare else "semel",
        "without": shape.without or "nothing",
        "images": mix.images,
        "fault_interval_s": options.fault_interval_s,
        "at_a_time": options.at_a_time,
    }


async def _tell(driver: Driver, requests: int, tell: Tell) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_S)
        wrong = sum(driver.tally.outcomes[one] for one in ("failed", "different", "admitted"))
        tell(f"requests, {wrong} wrong", driver.tally.ended, requests)
