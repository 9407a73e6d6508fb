"""Whether bare vLLM answers other media of a tiny model otherwise: `python -m tests.engine.bare FAMILY FOLDER`.

Writes one line of JSON. `scripts/families` runs it for each family in a process of its own: after an error of a model,
an engine may hang.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from semel.testing.models import FAMILIES
from tests.engine.families import TRANSCRIPT_STARTS
from tests.engine.parity import (
    GREEDY,
    Answer,
    Chat,
    Clip,
    Question,
    audio_part,
    bare_transcription,
    clip,
    image_part,
    picture,
    video,
    video_part,
)

__all__ = ["Verdict", "engine_arguments", "questions", "verdict"]

SINGLES: Final = 4


@dataclass(frozen=True)
class Verdict:
    """What came of asking a model everything twice."""

    questions: int
    distinct: int
    """Answers that differ, in tokens or in logprobs."""

    distinct_tokens: int
    repeats: int
    """Questions whose second answer was the first."""

    kinds: list[str]

    @property
    def is_right(self) -> bool:
        """Whether every question has an answer of its own, each time the same."""
        return self.questions == self.distinct == self.repeats


def parts(modality: str, count: int) -> list[dict[str, Any]]:
    """So many different items of a modality."""
    rng = np.random.default_rng([7, *modality.encode()])
    match modality:
        case "image":
            return [image_part(picture(rng)) for _ in range(count)]
        case "audio":
            return [audio_part(clip(rng)) for _ in range(count)]
        case _:
            return [video_part(video(rng)) for _ in range(count)]


def questions(max_items: Mapping[str, int]) -> Iterator[tuple[str, Chat]]:
    """One text with other media each time: none, single items, two in both orders, and one of every modality."""

    def chat(items: list[dict[str, Any]]) -> Chat:
        return [{"role": "user", "content": [*items, {"type": "text", "text": "What is this?"}]}]

    yield "text", chat([])
    firsts = []
    for modality, limit in max_items.items():
        items = parts(modality, SINGLES)
        firsts.append(items[0])
        for item in items:
            yield modality, chat([item])
        if limit > 1:
            yield f"2 {modality}s", chat(items[:2])
            yield f"2 {modality}s", chat(items[1::-1])
    if len(firsts) > 1:
        yield "+".join(max_items), chat(firsts)


def clips() -> Iterator[tuple[str, Clip]]:
    """For a model without chats."""
    rng = np.random.default_rng(7)
    for _ in range(SINGLES):
        yield "audio", Clip(clip(rng), TRANSCRIPT_STARTS[0])


def engine_arguments(family: str, folder: Path) -> Any:
    """vLLM's own arguments for a family, from the flags that its table names."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    flags = ["--model", str(folder), "--seed", "0", *FAMILIES[family].serving.engine_flags]
    return EngineArgs.from_cli_args(parser.parse_args(flags))


def ask(family: str, folder: Path) -> Verdict:
    """Start bare vLLM and ask it everything twice."""
    from vllm import LLM, SamplingParams

    arguments = engine_arguments(family, folder)
    llm = LLM(**{one.name: getattr(arguments, one.name) for one in fields(arguments)})
    sampling = SamplingParams(**GREEDY)
    table: list[tuple[str, Question]] = [
        *(clips() if family == "whisper" else questions(arguments.limit_mm_per_prompt))
    ]

    def answer(question: Question) -> Answer:
        if isinstance(question, Clip):
            (result,) = llm.generate([bare_transcription(question)], sampling, use_tqdm=False)
        else:
            (result,) = llm.chat([question], sampling, use_tqdm=False)
        output = result.outputs[0]
        steps = tuple({token: entry.logprob for token, entry in step.items()} for step in output.logprobs)
        return Answer(tuple(output.token_ids), steps)

    first = [answer(question) for _, question in table]
    llm.reset_prefix_cache()
    second = [answer(question) for _, question in table]
    return verdict([kind for kind, _ in table], first, second)


def verdict(kinds: list[str], first: list[Answer], second: list[Answer]) -> Verdict:
    """Count."""
    return Verdict(
        questions=len(kinds),
        distinct=len(set(map(repr, first))),
        distinct_tokens=len({answer.token_ids for answer in first}),
        repeats=sum(one == other for one, other in zip(first, second, strict=True)),
        kinds=list(dict.fromkeys(kinds)),
    )


def main() -> None:
    """Ask the model of the command line."""
    family, folder = sys.argv[1:]
    sys.stdout.write(json.dumps(asdict(ask(family, Path(folder)))) + "\n")


if __name__ == "__main__":
    main()
