"""The CPU time of the generic path over that of a fast one: `scripts/generic-cost`.

The same images through `--processor vllm` and `--processor hf`, on families that have both, in turns. A new item costs
its processing and the proof of its layout in the worker; a repeat costs the prompt alone. Fails over the limits.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from semel.cache import LruCache
from semel.compose import compose_pipeline
from semel.core import Contract, Key, Media
from semel.engine.vllm.model.model import VllmModel
from semel.engine.vllm.requests.inputs import build_item
from semel.lab.testing.models import build
from semel.processing.processor import Processor, ProcessorKind, load_processor
from semel.render import ChatRequest, Pipeline
from tests.engine.engineless import model_of
from tests.engine.parity import image_part
from tools.engine.sizes import image_of

FAMILIES: Final = ("qwen2-vl", "llava")
KINDS: Final[tuple[ProcessorKind, ...]] = ("hf", "vllm")
NEW_LIMIT_MS: Final = 1.0
REPEAT_LIMIT_MS: Final = 0.1

Times = dict[ProcessorKind, list[float]]


def main() -> None:
    """Measure every family, and show a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="how many images")
    count = parser.parse_args().count
    write("| family | | hf | vllm | the generic path adds | limit |")
    write("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="cost-") as folder:
        results = [measure(family, Path(folder) / family, count) for family in FAMILIES]
    sys.exit(not all(results))


def measure(family: str, folder: Path, count: int) -> bool:
    """Show the rows of a family; whether both are within their limits."""
    import torch

    torch.set_num_threads(1)
    model, _ = model_of(family, build(family, folder))
    loaded = {kind: load_processor(kind, folder, model.target) for kind in KINDS}
    pipelines = {
        kind: replace(compose_pipeline(folder, model.target, Key(bytes(32)), processor=kind), cache=LruCache(1 << 30))
        for kind in loaded
    }
    files = [image_of(100 + 3 * index, 160 + index) for index in range(count)]
    is_right = show(family, "a new image", new_items(loaded, model, files), NEW_LIMIT_MS)
    return show(family, "a repeat", asyncio.run(repeats(pipelines, files)), REPEAT_LIMIT_MS) and is_right


def new_items(loaded: Mapping[ProcessorKind, Processor], model: VllmModel, files: list[bytes]) -> Times:
    """Processing in the pool and the proof in the worker, each image for the first time."""

    def make(kind: ProcessorKind, file: bytes) -> None:
        feature = loaded[kind].process(Media("image", file, "image/png"))
        build_item(feature, contract, model)

    processor = loaded["hf"]
    contract = Contract(
        model="cost",
        fingerprint=processor.fingerprint,
        target=model.target,
        fields={modality: model.fields(modality) for modality in model.max_items},
        max_items=model.max_items,
        max_embeds=1 << 20,
        max_tokens=1 << 20,
        cache_bytes=0,
    )
    times: Times = {kind: [] for kind in loaded}
    for kind in loaded:
        make(kind, image_of(64, 64))  # whatever is loaded only once
    for file in files:
        for kind, spent in times.items():
            model._layouts = type(model._layouts)(max_entries=1, max_tokens=1 << 20)  # the other kind has laid it out
            spent.append(cpu_ms(lambda kind=kind, file=file: make(kind, file)))  # type: ignore[misc]
    return times


async def repeats(pipelines: Mapping[ProcessorKind, Pipeline], files: list[bytes]) -> Times:
    """Prompts with an image that was there before."""
    times: Times = {kind: [] for kind in pipelines}
    for file in files:
        chat: Any = [{"role": "user", "content": [image_part(file), {"type": "text", "text": "What is this?"}]}]
        for kind, spent in times.items():
            await pipelines[kind].chat(ChatRequest(chat))
            began = time.process_time()
            await pipelines[kind].chat(ChatRequest(chat))
            spent.append((time.process_time() - began) * 1e3)
    return times


def cpu_ms(work: Callable[[], None]) -> float:
    """Return the CPU time of some work, in milliseconds."""
    began = time.process_time()
    work()
    return (time.process_time() - began) * 1e3


def show(family: str, what: str, times: Times, limit_ms: float) -> bool:
    """Show a row of medians; whether it is within its limit."""
    hf, vllm = (statistics.median(times[kind]) for kind in KINDS)
    added = statistics.median(its - fast for fast, its in zip(times["hf"], times["vllm"], strict=True))
    is_right = added <= limit_ms
    limit = f"{limit_ms} ms" if is_right else f"{limit_ms} ms: OVER"
    write(f"| {family} | {what} | {hf:.2f} ms | {vllm:.2f} ms | {added:+.3f} ms | {limit} |")
    return is_right


def write(line: str) -> None:
    """Show a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
