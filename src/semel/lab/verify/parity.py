"""Both servers are asked the same questions: one after another, and many at once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from semel.lab.bench.serving.bench import Bench, Side
from semel.lab.bench.serving.client import CHAT
from semel.lab.verify.answers import Answer, Refusal, Reply, distance, reply_of, tolerance_of
from semel.lab.verify.diagnosis import Difference, alike_pairs, differences, telling_pairs
from semel.lab.verify.questions import Question
from semel.lab.verify.report import Section, without_paths

__all__ = ["Parity", "compare", "judge"]

_AT_ONCE: Final = 8

Replies = dict[str, Reply]


@dataclass(frozen=True, slots=True)
class Parity:
    """The answers of both servers."""

    questions: tuple[Question, ...]
    semel: Replies
    semel_at_once: Replies
    vllm: Replies
    vllm_at_once: Replies


async def compare(bench: Bench, questions: Sequence[Question]) -> Parity:
    """Ask both servers everything, in turns, then everything again with eight questions at a time."""
    total = 2 * len(questions)
    mine: Replies = {}
    theirs: Replies = {}
    for done, question in enumerate(questions):
        bench.tell("comparing answers", done, total)
        for side, replies in ((bench.sides.semel, mine), (bench.sides.vllm, theirs)):
            replies[question.name] = await _ask(side, question)
    at_once = []
    for number, side in enumerate((bench.sides.semel, bench.sides.vllm)):
        bench.tell("comparing answers, eight at a time", len(questions) + number * len(questions) // 2, total)
        at_once.append(await _ask_at_once(side, questions))
    return Parity(tuple(questions), mine, at_once[0], theirs, at_once[1])


async def _ask(side: Side, question: Question) -> Reply:
    answer = await side.client.ask(CHAT, question.body)
    return reply_of(answer.status, answer.body)


async def _ask_at_once(side: Side, questions: Sequence[Question]) -> Replies:
    turnstile = asyncio.Semaphore(_AT_ONCE)
    async with side.client.wider(_AT_ONCE) as client:

        async def ask(question: Question) -> Reply:
            async with turnstile:
                answer = await client.ask(CHAT, question.body)
            return reply_of(answer.status, answer.body)

        replies = await asyncio.gather(*map(ask, questions))
    return {question.name: reply for question, reply in zip(questions, replies, strict=True)}


def judge(parity: Parity) -> list[Section]:
    """Return what the answers say: whether they can prove anything, then whether they are equal."""
    answered = [name for name, reply in parity.vllm.items() if isinstance(reply, Answer)]
    if not answered:
        words = "bare vLLM answers none of the questions: nothing can be compared"
        messages = dict.fromkeys(reply.message for reply in parity.vllm.values() if isinstance(reply, Refusal))
        return [Section("parity", "unsure", words, tuple(map(without_paths, list(messages)[:3])))]
    tolerance = tolerance_of(distance(parity.vllm[name], parity.vllm_at_once[name], 0.05) for name in answered)
    if math.isinf(tolerance):
        words = "bare vLLM does not answer the same question alike twice: nothing can be compared"
        hint = "try --seed 0, --enforce-eager, or VLLM_BATCH_INVARIANT=1, on both sides"
        return [Section("parity", "unsure", words, (hint,))]
    found = differences(parity.questions, parity.semel, parity.vllm, tolerance)
    later = differences(parity.questions, parity.semel_at_once, parity.vllm, tolerance)
    return [_parity(parity, found, later, tolerance), *_refused(parity), _telling(parity, tolerance)]


def _parity(parity: Parity, found: list[Difference], later: list[Difference], tolerance: float) -> Section:
    compared = [question.name for question in parity.questions if isinstance(parity.vllm[question.name], Answer)]
    known = {difference.question for difference in found}
    lines = [f"{one.cause}: {one.question}: {one.detail}" for one in found]
    lines += [f"{one.cause}, at once only: {one.question}: {one.detail}" for one in later if one.question not in known]
    lines = [without_paths(line) for line in lines]
    equal = len(compared) - len({one.question for one in (*found, *later)})
    figures = {
        "questions": len(compared),
        "equal": equal,
        "tolerance": tolerance,
        "causes": sorted({one.cause for one in (*found, *later)}),
    }
    summary = f"{equal} of {len(compared)} questions, each asked twice, answered as bare vLLM answers them"
    return Section("parity", "failed" if lines else "passed", summary, tuple(lines), figures)


def _refused(parity: Parity) -> list[Section]:
    """Return the modalities that both servers refuse."""
    sections = []
    for modality in ("image", "audio", "video"):
        reply = parity.vllm.get(f"{modality} A")
        if isinstance(reply, Refusal) and isinstance(parity.semel[f"{modality} A"], Refusal):
            sections.append(
                Section(f"parity of {modality}", "skipped", "both servers refuse it", (reply.message[:200],))
            )
    return sections


def _telling(parity: Parity, tolerance: float) -> Section:
    """Return whether bare vLLM tells drawn items apart at all."""
    pairs = telling_pairs(parity.questions, parity.vllm)
    if not pairs:
        return Section("control", "unsure", "bare vLLM answers no two items, so nothing shows that it tells them apart")
    if alike := alike_pairs(pairs, parity.vllm, tolerance):
        return Section("control", "unsure", "the model answers these alike, so they prove little", tuple(alike))
    return Section("control", "passed", "bare vLLM answers other items otherwise: a wrong one would be seen")
