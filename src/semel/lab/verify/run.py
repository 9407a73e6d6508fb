"""The whole proof, part by part. A part that cannot run says why, and the others go on."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from semel.core import Modality
from semel.errors import ConfigError, ServiceError
from semel.lab.bench.serving.bench import Bench, Tell
from semel.lab.bench.serving.client import Client
from semel.lab.bench.serving.figures import Row
from semel.lab.bench.serving.report import format_figure
from semel.lab.bench.serving.run import Options, Running, measure, running, running_semel
from semel.lab.bench.serving.scenarios.restart import restart_flags, running_store
from semel.lab.bench.serving.stages import scrape
from semel.lab.verify.answers import Answer
from semel.lab.verify.parity import compare, judge
from semel.lab.verify.questions import Question, drawn_questions
from semel.lab.verify.report import (
    Outcome,
    Section,
    VerifyReport,
    describe_flags,
    describe_host,
    describe_model,
    without_paths,
)
from semel.telemetry import metrics
from semel.telemetry.scrape import Scrape

__all__ = ["SCENARIOS", "Proof", "capabilities", "capability_section", "speed_of", "verify"]

SCENARIOS: Final = ("text", "new", "again", "repeats")
"""Those of `semel bench serve` that run on any machine within some minutes."""

_TIER_FLAGS: Final = ("--embedding-tier-gb", "1")
_NO_PREFIXES: Final = "--no-enable-prefix-caching"
_OFF: Final = re.compile(r"this worker takes no (\w+), because semel would not serve it as vLLM does: (.*)")
_FAILED: Final = re.compile(r"(\w+ is switched off for this run: .*)")
_MODALITIES: Final[tuple[Modality, ...]] = ("image", "audio", "video")


@dataclass(frozen=True, slots=True)
class Proof:
    """The subject of a proof."""

    servers: Options
    """The two servers; `only` names the scenarios that are measured."""

    seed: int = 0
    """Of the drawn items."""


async def verify(proof: Proof, configuration: Section, tell: Tell) -> VerifyReport:
    """Prove it. `configuration` is what the checks before a start found."""
    sections = [configuration]
    if configuration.outcome == "failed":
        sections += [_skipped(name, "the configuration is not supported") for name in _PARTS]
    else:
        sections += await _with_servers(proof, tell)
    host = describe_host() | {"seed": proof.seed}
    flags = describe_flags(proof.servers.flags)
    return VerifyReport(host, describe_model(proof.servers.model), flags, tuple(sections))


_PARTS: Final = ("self-test", "capabilities", "parity", "once", "speed")


async def _with_servers(proof: Proof, tell: Tell) -> list[Section]:
    names = proof.servers.scenarios() if proof.servers.only else list(SCENARIOS)
    try:
        async with running(proof.servers, names, tell) as servers:
            sections = [_self_test(servers.bench), await _capabilities(servers.bench)]
            sections += await _compared(servers.bench, proof.seed)
            return [*sections, await _speed(servers, names, proof.servers)]
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")  # only there: it may have paths
        return [Section("start", "failed", "a server did not start; its words are on the terminal", (_kind(error),))]


def _kind(error: Exception) -> str:
    """Return the last line of an error without what may be a path."""
    words = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
    return without_paths(words)


def _self_test(bench: Bench) -> Section:
    """Return what the worker's own self-test said when it started."""
    log = bench.sides.semel.server.log
    if log is None:
        return _skipped("self-test", "the servers were not started here; a worker that fails it refuses the modality")
    off = _OFF.findall(_read(log))
    lines = tuple(f"{modality}: {without_paths(why)}" for modality, why in dict.fromkeys(off))
    if lines:
        return Section("self-test", "failed", "the worker has switched modalities off", lines)
    return Section("self-test", "passed", "features and prompts are bit by bit vLLM's own, for every modality")


async def _capabilities(bench: Bench) -> Section:
    server = bench.sides.semel.server
    if server.admin_url is None or server.log is None:
        return _skipped("capabilities", "the servers were not started here; `semel doctor --worker URL` shows them")
    lines = _FAILED.findall(_read(server.log))
    return capability_section(await _read_capabilities(server.admin_url), [without_paths(line) for line in lines])


def _read(log: Path) -> str:
    return log.read_text(errors="replace")


def capability_section(states: Mapping[str, str], reasons: Sequence[str] = ()) -> Section:
    """Return what the worker has proven at its start, and why a part is switched off."""
    lines = (*reasons, *(f"{name}: {state}" for name, state in states.items()))
    if off := [name for name, state in states.items() if state == "off"]:
        summary = f"{', '.join(off)} failed on this machine, and the worker does not use it"
        return Section("capabilities", "failed", summary, lines, states)
    if proven := [name for name, state in states.items() if state == "proven"]:
        return Section("capabilities", "passed", f"proven on this machine: {', '.join(proven)}", lines, states)
    return _skipped("capabilities", "this engine has nothing that could be proven")


async def capabilities(options: Options, tell: Tell) -> dict[str, str]:
    """Return the states of what a worker tries at its start: of a running one, or of one that is started here.

    That one has an embedding tier, and a store if this machine has a program for one.
    """
    if options.semel is not None:
        return await _read_capabilities(options.semel)
    async with AsyncExitStack() as stack:
        try:
            flags = restart_flags(await stack.enter_async_context(running_store()))
        except ConfigError:
            flags = _TIER_FLAGS
        server = await stack.enter_async_context(running_semel(options, flags, tell))
        assert server.admin_url is not None
        return await _read_capabilities(server.admin_url)


async def _read_capabilities(url: str) -> dict[str, str]:
    async with Client(url) as worker:
        found = Scrape.parse(await worker.read("/metrics"))
    return found.states(metrics.CAPABILITY, "state", of="name")


async def _compared(bench: Bench, seed: int) -> list[Section]:
    questions = drawn_questions(seed, _MODALITIES)
    before = await _counters(bench)
    parity = await compare(bench, questions)
    after = await _counters(bench)
    answered = [question for question in questions if isinstance(parity.semel[question.name], Answer)]
    return [*judge(parity), _once(answered, before, after)]


async def _counters(bench: Bench) -> Scrape | None:
    """Return the metrics of semel's side: of its frontend, and of its worker where that can be reached."""
    side = bench.sides.semel
    text = await side.client.read("/metrics")
    if metrics.POOL_PROCESSED.name not in text:
        return None
    found = Scrape.parse(text)
    if side.server.admin_url is None:
        return found
    async with Client(side.server.admin_url) as worker:
        return Scrape({**(await scrape(worker)).samples, **found.samples})


def _once(answered: Sequence[Question], before: Scrape | None, after: Scrape | None) -> Section:
    """Return whether each item was preprocessed and encoded once, by the servers' own counters."""
    if before is None or after is None:
        return _skipped("once", "semel's /metrics cannot be read: they are on another port, or need a key")
    items = {part for question in answered for part in (question.parts or (question.name,)) if question.modalities}
    if not items:
        return _skipped("once", "semel answered no question with an item")
    processed = after.total(metrics.POOL_PROCESSED) - before.total(metrics.POOL_PROCESSED)
    left_out = after.total(metrics.ENCODER_LEFT_OUT_BYTES) - before.total(metrics.ENCODER_LEFT_OUT_BYTES)
    figures = {
        "items": len(items),
        "preprocessed": processed,
        "encoded": after.total(metrics.ENCODER_PLANNED) - before.total(metrics.ENCODER_PLANNED),
        "evicted": after.total(metrics.ENCODER_CACHE_EVICTIONS) - before.total(metrics.ENCODER_CACHE_EVICTIONS),
        "left out by lazy transfer, MB": left_out / 1e6,
    }
    lines = tuple(f"{name}: {value:g}" for name, value in figures.items())
    summary = f"{len(items)} items were preprocessed {processed:g} times"
    if not processed:
        return Section("once", "unsure", "semel knew all items already; take another --draw-seed", lines, figures)
    return Section("once", "passed" if processed <= len(items) else "failed", summary, lines, figures)


async def _speed(servers: Running, names: Sequence[str], options: Options) -> Section:
    try:
        rows = await measure(servers, names, has_engine=bool(options.only))
    except ServiceError as error:
        return Section("speed", "failed", "a request of the benchmark failed", (_kind(error),))
    return speed_of(rows, options.flags)


def speed_of(measured: Sequence[Row], flags: Sequence[str] = ()) -> Section:
    """Return the figures next to bare vLLM's, and the limits that are not kept.

    Without a prefix cache the engine computes the prompt of a repeated image each time, on both sides: most of what the
    image adds is vLLM's, and its limit means nothing.
    """
    rows = [replace(row, is_promised=True) for row in measured]
    has_prefixes = _NO_PREFIXES not in {flag.replace("_", "-") for flag in flags}
    judged = [row for row in rows if row.limit is not None and (has_prefixes or row.scenario != "again")]
    missed = [row for row in judged if row.ok is False and row.is_sure]
    unsure = [row for row in judged if not row.is_sure]
    lines = [f"too slow: {_line(row)}" for row in missed]
    lines += [f"{_line(row)}, unsure" for row in unsure]
    lines += [_line(row, is_judged=row in judged) for row in rows if row not in (*missed, *unsure)]
    outcome: Outcome = "passed"
    summary = f"{len(judged)} limits kept"
    if missed:
        outcome, summary = "failed", f"{len(missed)} limits not kept, the first: {missed[0].name}"
    elif unsure:
        first = unsure[0].name + (f" and {len(unsure) - 1} more" if len(unsure) > 1 else "")
        outcome, summary = "unsure", f"a limit lies within the error of its figure ({first}); run it for longer"
    figures = {row.name: None if row.ratio is None else row.ratio.value for row in rows}
    return Section("speed", outcome, summary, tuple(lines), figures)


def _line(row: Row, *, is_judged: bool = True) -> str:
    ratio = "" if row.ratio is None else f", {format_figure(row.ratio)} of it"
    theirs = "" if row.vllm is None else f", vLLM {format_figure(row.vllm)}"
    limit = "" if row.limit is None else f" ({row.limit.kind} {row.limit.value:g})"
    if row.limit is not None and not is_judged:
        limit = " (no limit without a prefix cache)"
    return f"{row.name}: {format_figure(row.semel)} {row.unit}{theirs}{ratio}{limit}"


def _skipped(name: str, why: str) -> Section:
    return Section(name, "skipped", why)
