"""Causes of answers that differ from bare vLLM's. Pure: from the answers alone.

Each kind of fault leaves its mark. An option of the processor changes how many tokens an image has. Planes that are
swapped make semel answer an image as vLLM answers the same image with its planes swapped. An item that is lost makes it
answer two items as vLLM answers one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from semel.lab.verify.answers import Answer, Refusal, Reply, is_equal
from semel.lab.verify.questions import GREY, SWAPPED, Question

__all__ = ["Cause", "Difference", "alike_pairs", "differences", "telling_pairs"]

Cause = Literal["refused", "text", "processor option", "swapped planes", "values", "lost item", "order", "together"]


@dataclass(frozen=True, slots=True)
class Difference:
    """A question that semel answers otherwise."""

    question: str
    cause: Cause
    detail: str


@dataclass(frozen=True, slots=True)
class _Replies:
    mine: Mapping[str, Reply]
    theirs: Mapping[str, Reply]
    tolerance: float

    def is_equal(self, mine: str, theirs: str) -> bool:
        """Return whether semel's answer to a question is vLLM's answer to another one."""
        if mine not in self.mine or theirs not in self.theirs:
            return False
        return is_equal(self.mine[mine], self.theirs[theirs], self.tolerance)


def differences(
    questions: Sequence[Question], mine: Mapping[str, Reply], theirs: Mapping[str, Reply], tolerance: float
) -> list[Difference]:
    """Return each question that semel answers otherwise, and why. A modality that both refuse is no difference."""
    replies = _Replies(mine, theirs, tolerance)
    found = []
    for question in questions:
        name = question.name
        if not question.is_control and not replies.is_equal(name, name):
            cause, detail = _cause(question, replies)
            found.append(Difference(name, cause, detail))
    return found


def telling_pairs(questions: Sequence[Question], theirs: Mapping[str, Reply]) -> list[tuple[str, str]]:
    """Pairs of questions about different items, both of which bare vLLM answers."""
    named = {question.name for question in questions}
    pairs = [(name, name + suffix) for name in sorted(named) for suffix in (SWAPPED, GREY) if name + suffix in named]
    pairs += [(f"{kind} A", f"{kind} B") for kind in ("image", "audio", "video") if f"{kind} B" in named]
    return [
        (one, other) for one, other in pairs if isinstance(theirs[one], Answer) and isinstance(theirs[other], Answer)
    ]


def alike_pairs(pairs: Sequence[tuple[str, str]], theirs: Mapping[str, Reply], tolerance: float) -> list[str]:
    """Return the pairs that bare vLLM answers alike, so that a comparison of these would prove nothing."""
    return [f"{one} and {other}" for one, other in pairs if is_equal(theirs[one], theirs[other], tolerance)]


def _cause(question: Question, replies: _Replies) -> tuple[Cause, str]:
    mine, theirs = replies.mine[question.name], replies.theirs[question.name]
    if isinstance(mine, Refusal):
        return "refused", f"semel answers {mine.status}: {mine.message[:300]}"
    if isinstance(theirs, Refusal):
        return "refused", f"vLLM answers {theirs.status}, semel does not: {theirs.message[:300]}"
    if not question.modalities:
        return "text", "without any item: other weights, another chat template or other engine flags"
    if question.parts:
        return _cause_of_several(question, replies, mine, theirs)
    return _cause_of_one(question, replies, mine, theirs)


def _cause_of_one(question: Question, replies: _Replies, mine: Answer, theirs: Answer) -> tuple[Cause, str]:
    name = question.name
    if len(mine.prompt) != len(theirs.prompt):
        sizes = f"{len(mine.prompt)} prompt tokens, vLLM's has {len(theirs.prompt)}"
        return "processor option", f"{sizes}: other options of the model's processor, as --mm-processor-kwargs"
    if mine.prompt != theirs.prompt:
        return "processor option", "the prompt has as many tokens as vLLM's, but others"
    if replies.is_equal(name, name + SWAPPED):
        return "swapped planes", "semel answers it as vLLM answers the same image with red and blue swapped"
    if replies.is_equal(name + GREY, name + GREY):
        return "values", "the item has other values, but a grey one has not: colours are read otherwise"
    return "values", "the item has other values: another option of the processor, or another version of a library"


def _cause_of_several(question: Question, replies: _Replies, mine: Answer, theirs: Answer) -> tuple[Cause, str]:
    if wrong := [part for part in dict.fromkeys(question.parts) if not replies.is_equal(part, part)]:
        return _cause_of_part(wrong[0], replies)
    for part in dict.fromkeys(question.parts):
        if replies.is_equal(question.name, part):
            return "lost item", f"semel answers it as vLLM answers {part} alone"
    if len(mine.prompt) < len(theirs.prompt):
        missing = len(theirs.prompt) - len(mine.prompt)
        return "lost item", f"the prompt has {missing} tokens less than vLLM's, though each item alone is right"
    if len(question.parts) == 2:
        kind = question.modalities[0]
        other = f"{kind} B, A" if question.name == f"{kind} A, B" else f"{kind} A, B"
        if replies.is_equal(question.name, other):
            return "order", f"semel answers it as vLLM answers {other}"
    return "together", "each item alone is right, together they are not"


def _cause_of_part(part: str, replies: _Replies) -> tuple[Cause, str]:
    mine, theirs = replies.mine[part], replies.theirs[part]
    if isinstance(mine, Answer) and isinstance(theirs, Answer):
        cause, _ = _cause_of_one(Question(part, (), ("image",), b""), replies, mine, theirs)
        return cause, f"as {part} alone"
    return "refused", f"as {part} alone"
