"""One family on plain vLLM, as far as `SEMEL` says: `python -m tools.engine.door_parity FAMILY FOLDER [render]`.

Asks everything that a family is asked. Every kind of image file and damaged ones are among it, each as a new item and
then as one that the cache has. Then prompts are made of the files, in turns, with an item cache for two or three of
them. With `render`, prompts are made of everything, twice, the caches are emptied in between, and no engine starts.
Writes one line of JSON. `scripts/families --door` runs it in processes of their own and compares what they write.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import re
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from semel.lab.testing.models import FAMILIES
from semel.vllm_plugin.counters import COUNTS
from tests.engine.families import EVICTING
from tests.engine.family_questions import family_questions
from tests.engine.parity import GREEDY, Clip, Question, bare_transcription, image_part
from tests.security.corpus import specimens

__all__ = [
    "Reply",
    "differences",
    "door_questions",
    "evictions",
    "file_questions",
    "read_questions",
    "write_questions",
]

_ROOM: Final = 2.5
"""The small item cache, in the largest items."""
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
    items: list[str | None] = field(default_factory=list)
    """Digests of the tensors of each item; None for one that is in the engine's cache."""

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


def evictions(replies: Sequence[Reply]) -> int:
    """Return how many prompts of one item were rendered with its tensors again."""
    made = [repr(reply.hashes) for reply in replies if any(reply.items)]  # files of equal pixels have other hashes
    return len(made) - len(set(made))


def door_questions(family: str) -> Iterator[Question]:
    """Yield the questions of a family; files of every kind, and damaged ones, each twice, if it takes images."""
    yield from family_questions(family)
    for question in file_questions(family):
        yield from (question, question)


def file_questions(family: str) -> Iterator[Question]:
    """Yield a question about each kind of image file and about damaged ones, if a family takes images."""
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


def _arguments(family: str, folder: str, *flags: str) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    common = ["--model", folder, "--seed", "0", *FAMILIES[family].serving.engine_flags, *EVICTING]
    return AsyncEngineArgs.from_cli_args(parser.parse_args([*common, *flags]))


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
        items = [_digest(item) for some in made.get("mm_kwargs", {}).values() for item in some]
        found = Reply(list(made["prompt_token_ids"]), places, made.get("mm_hashes"), items)
        if generate is None:
            return found
        last = await generate(prompt)
    except Exception as error:  # noqa: BLE001 - a server answers it with a status
        told = create_error_response(error).error
        return Reply(fault=_ADDRESS.sub("", f"{told.code} {told.message}"))
    steps = [sorted((token, entry.logprob) for token, entry in step.items()) for step in last.logprobs]
    return replace(found, tokens=list(last.token_ids), logprobs=steps)


def _digest(item: Any) -> str | None:
    if item is None:
        return None
    digest = sha256()
    for name, value in sorted(item.get_data().items()):
        digest.update(f"{name} {getattr(value, 'dtype', '')}".encode())
        digest.update(pickle.dumps(value.double().tolist() if hasattr(value, "double") else value))
    return digest.hexdigest()


async def measure(family: str, folder: str) -> list[Reply]:
    """Start an engine and ask it everything."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(_arguments(family, folder))
    numbers = iter(range(1_000_000))

    async def generate(prompt: Any) -> Any:
        async for result in llm.generate(prompt, SamplingParams(**GREEDY), str(next(numbers))):
            last = result.outputs[0]
        return last

    try:
        return [await _reply(llm.renderer, question, generate) for question in read_questions(family, Path(folder))]
    finally:
        llm.shutdown()


async def render(family: str, folder: str) -> list[Reply]:
    """Render everything, twice."""
    found = []
    with _renderer(family, folder) as renderer:
        for _ in range(2):
            found += [await _reply(renderer, question, None) for question in read_questions(family, Path(folder))]
            await renderer.clear_mm_cache_async()
    return found


async def evict(family: str, folder: str) -> list[Reply]:
    """Render the files in turns, with an item cache for two or three of them."""
    questions = list(file_questions(family))
    if not questions:
        return []
    with _renderer(family, folder) as renderer:
        largest = max([await _item_bytes(renderer, question) for question in questions])
    with _renderer(family, folder, "--mm-processor-cache-gb", f"{_ROOM * largest / (1 << 30):.9f}") as renderer:
        return [await _reply(renderer, question, None) for question in (*questions, *questions)]


@contextmanager
def _renderer(family: str, folder: str, *flags: str) -> Iterator[Any]:
    from vllm.renderers import renderer_from_config

    renderer = renderer_from_config(_arguments(family, folder, *flags).create_engine_config())
    try:
        yield renderer
    finally:
        renderer.shutdown()


async def _item_bytes(renderer: Any, question: Question) -> int:
    with suppress(Exception):  # a damaged file has no item
        prompt = await _render(renderer, question)
        items = [item.get_data() for item in prompt["mm_kwargs"]["image"] if item is not None]
        return max(sum(getattr(value, "nbytes", 0) for value in item.values()) for item in items)
    return 0


def main() -> None:
    """Ask the model of the command line."""
    family, folder, *mode = sys.argv[1:]
    evicted: list[Reply] = []
    replies = asyncio.run((render if mode else measure)(family, folder))
    counts = dict(COUNTS)
    if not mode:
        evicted = asyncio.run(evict(family, folder))
    found = {"replies": [*map(asdict, replies)], "evicted": [*map(asdict, evicted)], "counts": counts}
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
