"""One side of one configuration: `python -m tools.engine.matrix_side NAME bare|semel FOLDER SCRATCH REQUESTS`.

Starts the engine, asks it everything, and writes one line of JSON with what it answered. `matrix_parity` compares two
such lines. Bare vLLM is its own `AsyncLLM` with its own rendering; semel is the engine of `semel worker` with semel's
rendering.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, Final

from semel.core import Submission
from semel.engine.vllm.proof import prove
from semel.engine.vllm.requests import item_delivery
from tests.engine.engines import ShippedRig, Start, running_as_worker
from tests.engine.parity import Chat
from tools.engine.eagle_head import write_head
from tools.engine.lies import lies, outcome_of
from tools.engine.matrix import MATRIX, Configuration, flags_of
from tools.engine.matrix_requests import MatrixRequest, control, random_requests
from tools.engine.sixteen import SIXTEEN, ProbeAnswer

__all__ = ["Side", "read_side"]

PROBE_TOKENS: Final = 24
RANDOM_TOKENS: Final = 8
_PREEMPTIONS: Final = "vllm:num_preemptions_total"

Ask = Callable[[MatrixRequest, int], Awaitable[ProbeAnswer]]


@dataclass
class Side:
    """What one side answered, and what it counted."""

    probes: dict[str, ProbeAnswer] = field(default_factory=dict)
    random: dict[str, ProbeAnswer] = field(default_factory=dict)
    """Those that were not aborted."""

    controls: dict[str, ProbeAnswer] = field(default_factory=dict)
    """What is asked again with a fault planted, before it is."""

    planted: dict[str, ProbeAnswer] = field(default_factory=dict)
    """With the fault."""

    proof: dict[str, str] = field(default_factory=dict)
    """The states of the engine's capabilities."""

    flipped: dict[str, str] = field(default_factory=dict)
    """The same with a bit flipped by what the embedding tier saves."""

    proved: dict[str, ProbeAnswer] = field(default_factory=dict)
    """The controls after that."""

    lies: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    aborted: int = 0
    preemptions: int = 0
    loads: int = 0
    evictions: int = 0
    """Of the encoder cache; semel counts them."""

    item_evictions: int = 0
    left_out_bytes: int = 0
    late_bytes: int = 0
    start_s: float = 0.0
    asking_s: float = 0.0
    faults: list[str] = field(default_factory=list)


async def ask_all(ask: Ask, one: Configuration, requests: Sequence[MatrixRequest], found: Side) -> None:
    """The probes, half of them one after another; random requests all at once; the controls."""
    probes = SIXTEEN if one.asks == "image" else ()
    half = len(probes) // 2
    asked = [MatrixRequest(probe.name, probe.chat) for probe in probes]
    answers = [await ask(request, PROBE_TOKENS) for request in asked[:half]]
    answers += await asyncio.gather(*(ask(request, PROBE_TOKENS) for request in asked[half:]))
    found.probes = {request.name: answer for request, answer in zip(asked, answers, strict=True)}
    answers = await asyncio.gather(*(ask(request, RANDOM_TOKENS) for request in requests))
    pairs = zip(requests, answers, strict=True)
    found.random = {request.name: answer for request, answer in pairs if not request.is_aborted}
    found.aborted = len(requests) - len(found.random)
    found.controls = {name: await ask(control(name), RANDOM_TOKENS) for name in one.plants}


async def run_bare(one: Configuration, folder: Path, scratch: Path, requests: Sequence[MatrixRequest]) -> Side:
    """vLLM by itself."""
    found, began = Side(), time.monotonic()
    async with bare_engine(folder, flags_of(one, scratch, is_semel=False)) as llm:
        found.start_s = time.monotonic() - began
        found.facts = _facts(llm.vllm_config, one)
        began = time.monotonic()
        await ask_all(_bare_asking(llm, one), one, requests, found)
        found.asking_s = time.monotonic() - began
        found.preemptions = _preemptions()
    return found


@asynccontextmanager
async def bare_engine(folder: Path, flags: Sequence[str]) -> AsyncIterator[Any]:
    """An `AsyncLLM` without any part of semel."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", str(folder), *flags]))
    llm = AsyncLLM.from_engine_args(arguments)
    try:
        yield llm
    finally:
        await asyncio.to_thread(llm.shutdown)


def _bare_asking(llm: Any, one: Configuration) -> Ask:
    from vllm.renderers.params import ChatParams
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    # vLLM's item cache wants requests in the order in which they were rendered, and evicts all the time here.
    order = asyncio.Lock()

    async def ask(request: MatrixRequest, max_tokens: int) -> ProbeAnswer:
        kind = RequestOutputKind.CUMULATIVE if request.answers == 1 else RequestOutputKind.FINAL_ONLY
        params = SamplingParams(**_sampling(request, max_tokens), output_kind=kind)
        options = {"priority": request.priority} if one.has_priorities else {}
        async with order:
            rendering = ChatParams(chat_template_kwargs={"add_generation_prompt": True})
            _, (prompt,) = await llm.renderer.render_chat_async([request.chat], rendering)
            queue = await llm.add_request(request.name, prompt, params, **options)
        while True:
            output = queue.get_nowait() or await queue.get()
            if request.is_aborted:
                await llm.abort(request.name)
                return ProbeAnswer()
            if output.finished:
                break
        if wrong := [one.finish_reason for one in output.outputs if one.finish_reason != "length"]:
            return ProbeAnswer(fault=f"ended by {wrong[0]}")
        if len(output.outputs) != request.answers:
            return ProbeAnswer(fault=f"{len(output.outputs)} answers")
        steps = [pair for one in output.outputs for pair in zip(one.token_ids, one.logprobs, strict=True)]
        return ProbeAnswer(tuple(token for token, _ in steps), tuple(step[token].logprob for token, step in steps))

    return ask


async def run_semel(one: Configuration, folder: Path, scratch: Path, requests: Sequence[MatrixRequest]) -> Side:
    """The engine of a worker."""
    found, began = Side(), time.monotonic()
    flags = tuple(flags_of(one, scratch, is_semel=True))
    start = Start(one.model, flags, one.encoder_planning, common=(), tier_bytes=one.tier_bytes)
    async with running_as_worker(start, folder) as rig:
        found.start_s = time.monotonic() - began
        found.facts = _facts(rig.llm.vllm_config, one)
        began = time.monotonic()
        ask = _semel_asking(rig, one)
        await ask_all(ask, one, requests, found)
        totals = await rig.totals()
        found.preemptions = _preemptions()
        found.evictions, found.item_evictions = totals.evictions, rig.engine.item_cache.evictions
        found.left_out_bytes, found.late_bytes = totals.left_out_bytes, totals.late_bytes
        found.loads = totals.tier_loads
        if one.has_lies:
            await _tell_lies(rig, found)
        await _prove(rig, one, found, ask)
        for name in one.plants:
            await rig.engine.reset()
            await rig.llm.collective_rpc("plant", args=(name,))
            found.planted[name] = await ask(control(name), RANDOM_TOKENS)
        found.asking_s = time.monotonic() - began
    return found


async def _prove(rig: ShippedRig, one: Configuration, found: Side, ask: Ask) -> None:
    """Let the engine prove what it has of semel; with a tier, once more with a wrong copy."""
    found.proof = dict(await _proven(rig))
    if one.tier_bytes:
        await rig.llm.collective_rpc("plant", args=("flipped",))
        found.flipped = dict(await _proven(rig))
    found.proved = {name: await ask(control(name), RANDOM_TOKENS) for name in one.plants}


async def _proven(rig: ShippedRig) -> Mapping[str, str]:
    """Prove, without a warm-up: no grammar compiles in the second runner here, whose kernels Triton interprets."""
    return await prove(rig.engine, rig.llm, rig.engine._samples, rig.engine._tier)


def _semel_asking(rig: ShippedRig, one: Configuration) -> Ask:
    async def ask(request: MatrixRequest, max_tokens: int) -> ProbeAnswer:
        rendered = await rig.render(request.chat)
        sampling = _sampling(request, max_tokens)
        priority = request.priority if one.has_priorities else 0
        submission = Submission(request.name, rendered.prompt, rendered.features, sampling, priority=priority)
        steps: list[list[tuple[int, float]]] = [[] for _ in range(request.answers)]
        try:
            stream = await rig.engine.submit(submission)
            try:
                async for output in stream:
                    pairs = zip(output.token_ids, output.logprobs or (), strict=False)
                    steps[output.index] += [(token, step[token]) for token, step in pairs]
                    if request.is_aborted:
                        return ProbeAnswer()
            finally:
                await stream.close()
        except Exception as error:  # noqa: BLE001 - a difference to bare vLLM, whatever it is
            return ProbeAnswer(fault=f"{type(error).__name__}: {error}"[:300])
        whole = [step for one in steps for step in one]
        return ProbeAnswer(tuple(token for token, _ in whole), tuple(logprob for _, logprob in whole))

    return ask


def _sampling(request: MatrixRequest, max_tokens: int) -> dict[str, Any]:
    """Greedy; vLLM grants several answers only to those who draw, from one token here."""
    drawn = {"temperature": 0.0} if request.answers == 1 else {"temperature": 1.0, "top_k": 1, "n": request.answers}
    return {**drawn, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 1}


async def _tell_lies(rig: ShippedRig, found: Side) -> None:
    """Those that only the guard can end."""
    honest, other = [await rig.render(_sole(index)) for index in (0, 3)]
    for lie in lies(honest, other):
        if not lie.is_checked:
            found.lies[lie.name] = await outcome_of(rig, honest, lie)


def _sole(index: int) -> Chat:
    return SIXTEEN[index].chat


def _facts(config: Any, one: Configuration) -> dict[str, Any]:
    return {path: reduce(getattr, path.split("."), config) for path in one.facts}


def _preemptions() -> int:
    """As vLLM counts them in this process."""
    from prometheus_client import REGISTRY

    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return int(sum(sample.value for sample in samples if sample.name == _PREEMPTIONS))


def read_side(line: str) -> Side:
    """What `main` wrote."""
    read: Mapping[str, Any] = json.loads(line)
    answers = ("probes", "random", "controls", "planted", "proved")
    whole = {name: {key: _answer(value) for key, value in read[name].items()} for name in answers}
    return Side(**{**read, **whole})


def _answer(read: Mapping[str, Any]) -> ProbeAnswer:
    return ProbeAnswer(tuple(read["token_ids"]), tuple(read["logprobs"]), read["fault"])


def main() -> None:
    """Run the side of the command line."""
    name, kind, folder, scratch, count = sys.argv[1:]
    one, requests = MATRIX[name], random_requests(int(count), asks=MATRIX[name].asks)
    if not one.has_several_answers:
        requests = [replace(request, answers=1) for request in requests]
        item_delivery.BATCH_ITEMS = 1  # type: ignore[misc]
    if one.has_eagle_head:
        write_head(Path(scratch) / "head")
    run = run_bare if kind == "bare" else run_semel
    try:
        found = asyncio.run(run(one, Path(folder), Path(scratch), requests))
    except Exception as error:  # noqa: BLE001 - the reason is a row of the table
        traceback.print_exc()
        found = Side(faults=[f"{type(error).__name__}: {error}"[:500]])
    sys.stdout.write("\n" + json.dumps(asdict(found)) + "\n")


if __name__ == "__main__":
    main()
