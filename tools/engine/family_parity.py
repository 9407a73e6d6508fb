"""One family on one engine, as `semel worker` starts it: `python -m tools.engine.family_parity FAMILY FOLDER`.

Bare vLLM's answers and semel's are compared, tokens and logprobs. A feature with other values is the control: it must
be answered otherwise. Features that lie are refused, or end alone. Images of random sizes are answered. Writes one line
of JSON. `scripts/families` runs it for each family in a process of its own: after an error of a model, an engine may
hang.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from semel.errors import RequestError, SemelError
from semel.lab.testing.models import FAMILIES
from tests.engine.engines import ShippedRig, Start, running_as_worker
from tests.engine.families import EVICTING
from tests.engine.family_questions import family_questions, inverted
from tests.engine.parity import Question, image_part, submission
from tests.engine.rendering import rebuilt
from tools.engine.lies import lies, outcome_of
from tools.engine.sizes import image_of, random_sizes

__all__ = ["Parity", "refused_sizes", "start_of"]

SIZES: Final = 30


@dataclass
class Parity:
    """What came of a family."""

    questions: int = 0
    equal: int = 0
    """Questions that semel answered as bare vLLM does."""

    distinct: int = 0
    """Answers of bare vLLM that differ from one another, in tokens or in logprobs."""

    items: int = 0
    evictions: int = 0
    modalities: dict[str, int] = field(default_factory=dict)
    """How many items of each modality a prompt may have."""

    is_control_seen: bool = False
    """Whether a feature with other values was answered otherwise."""

    lies: dict[str, str] = field(default_factory=dict)
    sizes: int = 0
    refused_sizes: dict[str, str] = field(default_factory=dict)
    """Sizes of images that were refused as a client's fault, and the words."""

    faults: list[str] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        """Whether every answer is bare vLLM's, and the comparison could have failed."""
        return not self.faults and self.is_control_seen and self.questions == self.equal > 0


def start_of(family: str) -> Start:
    """The engine of a worker, with a small item cache."""
    return Start(family, (*FAMILIES[family].serving.engine_flags, *EVICTING))


async def compare_answers(rig: ShippedRig, asked: list[Question], found: Parity) -> None:
    """Count the questions that both sides answer alike."""
    await rig.engine.reset()
    expected = [await rig.bare(question) for question in asked]
    await rig.engine.reset()
    before = await rig.totals()
    found.questions, found.distinct = len(asked), len(set(map(repr, expected)))
    for index, (question, bare) in enumerate(zip(asked, expected, strict=True)):
        try:
            rendered = await rig.render(question)
            ours = await rig.answer(rendered)
        except SemelError as error:
            found.faults.append(f"question {index}: {error}"[:300])
            continue
        found.items += len(rendered.prompt.items)
        found.equal += ours == bare
    found.evictions = (await rig.totals()).evictions - before.evictions


async def see_control(rig: ShippedRig, question: Question, found: Parity) -> None:
    """Whether an item with other values has another answer."""
    rendered = await rig.render(question)
    (feature,) = rendered.features.values()
    await rig.engine.reset()
    right = await rig.answer(rendered)
    await rig.engine.reset()
    found.is_control_seen = await rig.answer(rebuilt(rendered, inverted(feature))) != right
    await rig.engine.reset()


async def tell_lies(rig: ShippedRig, question: Question, larger: Question, found: Parity) -> None:
    """Send features that lie, with semel's checks before the engine and without them."""
    honest, other = await rig.render(question), await rig.render(larger)
    for lie in lies(honest, other):
        found.lies[lie.name] = await outcome_of(rig, honest, lie)


async def refused_sizes(rig: ShippedRig, count: int) -> dict[str, str]:
    """Those of many sizes of images that are refused as the client's fault, with the words; all others are answered."""
    refused: dict[str, str] = {}
    for width, height in random_sizes(count):
        content = [image_part(image_of(width, height)), {"type": "text", "text": "What is this?"}]
        try:
            rendered = await rig.render([{"role": "user", "content": content}])
            async for _ in await rig.engine.submit(submission(rendered, max_tokens=1)):
                pass
        except RequestError as error:
            refused[f"{width}×{height}"] = str(error)[:200]
    return refused


async def measure(family: str, folder: Path) -> Parity:
    """Start the engine of a family and ask it everything."""
    found = Parity()
    asked = family_questions(family)
    first, second = asked[:2] if family == "whisper" else asked[1:3]
    async with running_as_worker(start_of(family), folder) as rig:
        limits = rig.engine.contract.max_items
        found.modalities = {str(modality): limit for modality, limit in limits.items()}
        missing = FAMILIES[family].serving.max_items.keys() - limits
        found.faults += [f"the self-test switched {modality} off" for modality in sorted(missing)]
        await rig.engine.warm()
        await compare_answers(rig, asked, found)
        await see_control(rig, first, found)
        if "image" in limits:
            found.sizes, found.refused_sizes = SIZES, await refused_sizes(rig, SIZES)
        try:
            await tell_lies(rig, first, second, found)
        except Exception as error:  # noqa: BLE001 - what was compared before is written all the same
            traceback.print_exc()
            found.faults.append(f"{type(error).__name__}: {error}"[:300])
    return found


def main() -> None:
    """Measure the model of the command line."""
    family, folder = sys.argv[1:]
    try:
        found = asyncio.run(measure(family, Path(folder)))
    except Exception as error:  # noqa: BLE001 - the reason is a row of the table
        traceback.print_exc()
        found = Parity(faults=[f"{type(error).__name__}: {error}"[:500]])
    sys.stdout.write("\n" + json.dumps(asdict(found)) + "\n")


if __name__ == "__main__":
    main()
