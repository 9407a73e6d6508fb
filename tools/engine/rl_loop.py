"""A loop over `AsyncLLM` as RL frameworks drive it: what is decoded and preprocessed, and what fails.

    python -m tools.engine.rl_loop                                          # 3 steps, 16 samples of each of 20 images
    python -m tools.engine.rl_loop --steps 2 --samples 4 --images 6         # smaller
    python -m tools.engine.rl_loop --served                                 # only `semel serve`, with new weights

Each step samples answers to the same images: a third with `n` in one raw prompt, a third as raw prompts at once, a
third as chats at once. Some samples are still running when it ends: generation is paused, which aborts them and empties
the caches for new weights, and resumed. Plain vLLM with its item cache, without it (as verl runs it), and with
`SEMEL=1`, which fails if it decodes an image twice between two pauses, if it does not preprocess each exactly once, or
if a sample fails. At last through `semel serve` (`rl_served`), whose weights are updated after each step.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np
from PIL import Image, ImageFile

from semel.lab.testing.models import build
from semel.vllm_plugin.counters import COUNTS
from tests.engine.parity import draw_image, image_part
from tools.engine.children import json_of
from tools.engine.rl_served import faults_of_served, served_loop

__all__ = ["Loop", "Mode", "faults_of"]

_TOKENS: Final = 8
_LONG: Final = 128
_LEFT: Final = 4
"""Samples that are running when generation is paused."""
_SIDE: Final = 224
_DEADLINE_S: Final = 1_800
_PROMPT: Final = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is this?<|im_end|>\n"
_FLAGS: Final = ("--enforce-eager", "--dtype", "float32", "--seed", "0", "--max-model-len", "4096")
_HEAD: Final = "| | decodes | preprocessings | of images × steps | samples | failed | seconds |"


@dataclass(frozen=True)
class Mode:
    """A way to run the loop."""

    name: str
    levels: str
    flags: tuple[str, ...] = ()


@dataclass
class Loop:
    """The counts of a loop."""

    images: int
    """Images times steps: how often each would be decoded if it were once in the life of a cache."""

    decodes: int = 0
    preprocessings: int = 0
    samples: int = 0
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


MODES: Final = (
    Mode("vLLM, item cache on", "0"),
    Mode("vLLM, item cache off", "0", ("--mm-processor-cache-gb", "0")),
    Mode("vLLM with SEMEL=1", "1"),
)


def faults_of(loop: Loop) -> list[str]:
    """Return what the door must not do."""
    faults = [f"{len(loop.failures)} samples failed: {loop.failures[0]}"] if loop.failures else []
    if loop.decodes > loop.images:
        faults.append(f"{loop.decodes} decodes instead of {loop.images}")
    if loop.preprocessings != loop.images:  # fewer: they are not counted, or a pause empties nothing
        faults.append(f"{loop.preprocessings} preprocessings instead of {loop.images}")
    return faults


def count_work(counts: Counter[str]) -> None:
    """Count what this process decodes and preprocesses; the pool's processes are counted by the door."""
    from vllm.multimodal.processing.context import InputProcessingContext

    load, call = ImageFile.ImageFile.load, InputProcessingContext.call_hf_processor

    def counted_load(image: Any) -> Any:
        counts["decodes"] += bool(image.tile)
        return load(image)

    def counted_call(context: Any, processor: Any, data: Any, *rest: Any, **settings: Any) -> Any:
        counts["preprocessings"] += bool(data.get("images"))
        return call(context, processor, data, *rest, **settings)

    ImageFile.ImageFile.load = counted_load  # type: ignore[assignment, method-assign]
    InputProcessingContext.call_hf_processor = counted_call


@dataclass(frozen=True)
class Picked:
    """An image of the training set: its file, and the pixels that the framework has of it."""

    data: bytes
    pixels: Any

    def raw(self) -> dict[str, Any]:
        """Return a raw prompt with it."""
        return {"prompt": _PROMPT, "multi_modal_data": {"image": Image.fromarray(self.pixels)}}

    def chat(self) -> list[dict[str, Any]]:
        """Return a chat with it."""
        return [{"role": "user", "content": [image_part(self.data), {"type": "text", "text": "What is this?"}]}]


class Driver:
    """The part of a framework that samples."""

    def __init__(self, llm: Any, loop: Loop, samples: int) -> None:
        self._llm = llm
        self._loop = loop
        self._samples = samples
        self._number = 0

    async def step(self, images: Sequence[Picked], *, left: int = _LEFT) -> None:
        """Sample answers to all images, then pause and resume; so many samples are still running then."""
        await asyncio.gather(*(self._ask_about(number, image) for number, image in enumerate(images)))
        raw = [image for number, image in enumerate(images) if number % 3 != 2]  # a chat's image has another hash
        running = [asyncio.create_task(self._sample(image.raw(), _LONG, is_left=True)) for image in raw[:left]]
        await asyncio.sleep(0)
        await self._llm.pause_generation()
        await self._llm.resume_generation()
        await asyncio.gather(*running)

    async def _ask_about(self, number: int, image: Picked) -> None:
        if number % 3 == 0:
            await self._sample(image.raw(), _TOKENS, n=self._samples)
            return
        prompts = [image.raw() if number % 3 == 1 else image.chat() for _ in range(self._samples)]
        await asyncio.gather(*(self._sample(prompt, _TOKENS) for prompt in prompts))

    async def _sample(self, prompt: Any, tokens: int, *, n: int = 1, is_left: bool = False) -> None:
        from vllm.sampling_params import SamplingParams

        self._number += 1
        name = f"{id(self)}-{self._number}"
        params = SamplingParams(n=n, max_tokens=tokens, ignore_eos=True, temperature=1.0)
        reasons: dict[int, str | None] = {}
        try:
            rendered = await self._render(prompt) if isinstance(prompt, list) else prompt
            async for result in self._llm.generate(rendered, params, name):
                reasons |= {output.index: output.finish_reason for output in result.outputs}
        except Exception as error:  # noqa: BLE001 - a failure is what is counted
            self._loop.failures.append(f"{type(error).__name__}: {error}"[:200])
            return
        self._loop.samples += n
        if not is_left and [*reasons.values()] != ["length"] * n:
            self._loop.failures.append(f"finished as {reasons}, of {n}")

    async def _render(self, chat: list[dict[str, Any]]) -> Any:
        from vllm.renderers.params import ChatParams

        params = ChatParams(chat_template_kwargs={"add_generation_prompt": True})
        _, (prompt,) = await self._llm.renderer.render_chat_async([chat], params)
        return prompt


def pick(count: int) -> list[Picked]:
    """Draw the training set."""
    rng = np.random.default_rng(1)
    files = [draw_image(rng, side=_SIDE) for _ in range(count)]
    return [Picked(data, np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))) for data in files]


async def run(folder: str, steps: int, samples: int, images: int, flags: Sequence[str]) -> Loop:
    """Start an engine and run the loop."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    first, *others = pick(images + 1)
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", folder, *_FLAGS, *flags]))
    llm = AsyncLLM.from_engine_args(arguments)
    loop, counts = Loop(images * steps), Counter[str]()
    try:
        await Driver(llm, warm := Loop(0), 1).step([first])  # what is behind the door has started now
        if warm.failures:
            raise RuntimeError(warm.failures[0])
        count_work(counts)
        made, began = COUNTS["preprocessed"], perf_counter()
        driver = Driver(llm, loop, samples)
        for step in range(steps):
            await driver.step(others, left=_LEFT if step < steps - 1 else 0)
        loop.seconds, made = perf_counter() - began, COUNTS["preprocessed"] - made
        loop.decodes, loop.preprocessings = counts["decodes"] + made, counts["preprocessings"] + made
    finally:
        llm.shutdown()
    return loop


def compare(steps: int, samples: int, images: int) -> list[str]:
    """Run the loop in every mode, show a table, and return what is wrong with the door."""
    loop = Loop(0)
    sys.stdout.write(_HEAD + "\n")
    with tempfile.TemporaryDirectory(prefix="rl-loop-") as scratch:
        model = build("qwen2-vl", Path(scratch) / "model")
        for mode in MODES:
            arguments = ["--in", str(model), str(steps), str(samples), str(images), *mode.flags]
            log, levels = Path(scratch) / "log", {"SEMEL": mode.levels}
            told = json_of("tools.engine.rl_loop", arguments, log=log, deadline_s=_DEADLINE_S, environment=levels)
            loop = Loop(**json.loads(told))
            counts = f"{loop.decodes} | {loop.preprocessings} | {loop.images} | {loop.samples} | {len(loop.failures)}"
            sys.stdout.write(f"| {mode.name} | {counts} | {loop.seconds:.1f} |\n")
            sys.stdout.write("".join(f"    {words}\n" for words in loop.failures[:1]))
            sys.stdout.flush()
    return faults_of(loop)


def serve(steps: int, samples: int, images: int) -> list[str]:
    """Run the loop through `semel serve`, show a row and what the encoder did, and return what is wrong."""
    with tempfile.TemporaryDirectory(prefix="rl-served-") as scratch:
        loop = served_loop(build("qwen2-vl", Path(scratch) / "model"), Path(scratch), steps, samples, images)
    counts = f"{loop.decodes} | {loop.preprocessings} | {images * steps} | {loop.samples} | {len(loop.failures)}"
    sys.stdout.write(f"| semel serve, new weights in place | {counts} | {loop.seconds:.1f} |\n")
    sys.stdout.write(f"    {loop.encodes} encodes; {loop.aborted} samples were aborted by pauses\n")
    return faults_of_served(loop)


def main() -> None:
    """Run all modes, or the one of this process."""
    if sys.argv[1:2] == ["--in"]:
        folder, steps, samples, images, *flags = sys.argv[2:]
        loop = asyncio.run(run(folder, int(steps), int(samples), int(images), flags))
        sys.stdout.write("\n" + json.dumps(asdict(loop)) + "\n")
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--served", action="store_true")
    options = parser.parse_args()
    sizes = options.steps, options.samples, options.images
    faults = [*([] if options.served else compare(*sizes)), *serve(*sizes)]
    sys.exit("\n".join(faults) or 0)


if __name__ == "__main__":
    main()
