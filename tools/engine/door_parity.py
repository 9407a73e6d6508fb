"""One family on plain vLLM, as far as `SEMEL` says: `python -m tools.engine.door_parity FAMILY FOLDER [render]`.

Asks everything that a family is asked, every kind of image file and damaged ones, twice: the caches are emptied in
between. With `render`, prompts are made and no engine starts. Writes one line of JSON. `scripts/families --door` runs
it in processes of their own and compares what they write.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from semel.lab.testing.models import FAMILIES
from semel.vllm_plugin.counters import COUNTS
from tests.engine.families import EVICTING
from tests.engine.family_questions import family_questions
from tests.engine.parity import GREEDY, Clip, Question, bare_transcription, image_part
from tests.security.corpus import specimens

__all__ = ["Reply", "differences", "door_questions", "read_questions", "write_questions"]

_TRUNCATED: Final = 0.5
_QUESTIONS: Final = ".questions"
_ADDRESS: Final = re.compile(r"0x[0-9a-f]+")
"""Where an object is, which some messages of Pillow say."""


@dataclass(frozen=True)
class Reply:
    """What vLLM made of a question."""

    prompt: list[int] = field(default_factory=list)
    placeholders: Any = None
    """By modality: offset, length and which of its tokens are embeddings."""

    hashes: Any = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    fault: str = ""
    """The status and the words of a server, if it is refused."""


def differences(bare: Sequence[Reply], door: Sequence[Reply], parts: Sequence[str]) -> list[str]:
    """Return a line for every reply in which one of these parts, or the fault, is not bare vLLM's."""
    lines = [f"{len(door)} replies instead of {len(bare)}"] if len(bare) != len(door) else []
    for number, (one, other) in enumerate(zip(bare, door, strict=False)):
        wrong = [part for part in (*parts, "fault") if getattr(one, part) != getattr(other, part)]
        lines += [
            f"question {number}, {part}: {getattr(one, part)!r} / {getattr(other, part)!r}"[:300] for part in wrong
        ]
    return lines


def door_questions(family: str) -> Iterator[Question]:
    """Yield the questions of a family; files of every kind, and damaged ones, if it takes images."""
    yield from family_questions(family)
    if "image" not in FAMILIES[family].serving.max_items:
        return
    files = [one.media.data for one in specimens() if one.media.modality == "image"]
    damaged = [b"", b"no image", *(bytes(data[: int(len(data) * _TRUNCATED)]) for data in files[::8])]
    for data in (*files, *damaged):
        yield [{"role": "user", "content": [image_part(bytes(data)), {"type": "text", "text": "What is this?"}]}]


def write_questions(family: str, folder: Path) -> None:
    """Write the chats of a family next to its model: an encoder of video makes other bytes in each process."""
    if family != "whisper":
        folder.with_suffix(_QUESTIONS).write_text(json.dumps(list(door_questions(family))))


def read_questions(family: str, folder: Path) -> list[Question]:
    """Return what was written, or the questions anew."""
    path = folder.with_suffix(_QUESTIONS)
    return json.loads(path.read_text()) if path.exists() else list(door_questions(family))


def _arguments(family: str, folder: str) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    flags = ["--model", folder, "--seed", "0", *FAMILIES[family].serving.engine_flags, *EVICTING]
    return AsyncEngineArgs.from_cli_args(parser.parse_args(flags))


async def _render(renderer: Any, question: Question) -> Any:
    """Return the prompt that vLLM's server or a caller of `AsyncLLM` would submit."""
    from vllm.renderers.inputs.preprocess import parse_model_prompt
    from vllm.renderers.params import ChatParams

    if isinstance(question, Clip):
        parsed = parse_model_prompt(renderer.model_config, bare_transcription(question))
        (prompt,) = await renderer.render_cmpl_async([parsed])
        return prompt
    params = ChatParams(chat_template_kwargs={"add_generation_prompt": True})
    _, (prompt,) = await renderer.render_chat_async([question], params)
    return prompt


async def _reply(renderer: Any, question: Question, generate: Callable[[Any], Awaitable[Any]] | None) -> Reply:
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

    try:
        prompt = await _render(renderer, question)
        made = prompt.get("encoder_prompt", prompt)
        places = {
            modality: [
                [one.offset, one.length, None if one.is_embed is None else one.is_embed.tolist()] for one in some
            ]
            for modality, some in made.get("mm_placeholders", {}).items()
        }
        found = Reply(list(made["prompt_token_ids"]), places, made.get("mm_hashes"))
        if generate is None:
            return found
        last = await generate(prompt)
    except Exception as error:  # noqa: BLE001 - a server answers it with a status
        told = create_error_response(error).error
        return Reply(fault=_ADDRESS.sub("", f"{told.code} {told.message}"))
    steps = [sorted((token, entry.logprob) for token, entry in step.items()) for step in last.logprobs]
    return Reply(found.prompt, found.placeholders, found.hashes, list(last.token_ids), steps)


async def measure(family: str, folder: str) -> list[Reply]:
    """Start an engine and ask it everything, twice."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(_arguments(family, folder))
    numbers = iter(range(1_000_000))

    async def generate(prompt: Any) -> Any:
        async for result in llm.generate(prompt, SamplingParams(**GREEDY), str(next(numbers))):
            last = result.outputs[0]
        return last

    found = []
    try:
        for _ in range(2):
            found += [
                await _reply(llm.renderer, question, generate) for question in read_questions(family, Path(folder))
            ]
            await llm.reset_mm_cache()
            await llm.reset_prefix_cache()
            await llm.reset_encoder_cache()
    finally:
        llm.shutdown()
    return found


async def render(family: str, folder: str) -> list[Reply]:
    """Render everything, twice."""
    from vllm.renderers import renderer_from_config

    renderer = renderer_from_config(_arguments(family, folder).create_engine_config())
    found = []
    try:
        for _ in range(2):
            found += [await _reply(renderer, question, None) for question in read_questions(family, Path(folder))]
            await renderer.clear_mm_cache_async()
    finally:
        renderer.shutdown()
    return found


def main() -> None:
    """Ask the model of the command line."""
    family, folder, *mode = sys.argv[1:]
    replies = asyncio.run((render if mode == ["render"] else measure)(family, str(Path(folder))))
    found = {"replies": [asdict(reply) for reply in replies], "counts": dict(COUNTS)}
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
