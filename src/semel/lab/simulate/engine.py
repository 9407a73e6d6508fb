"""A modelled engine: what it keeps and when it steps are those of vLLM with semel; only times are guesses (`Costs`).

Pure: it has the shipped `Residency` and `Planner` for encoder outputs, a prefix cache, and continuous batching with
chunked prefill. `served_engine` puts it behind the `Engine` protocol.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, KeysView, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from semel.core import LruMap, Placeholder, Timeline
from semel.encoder.plan import Planner, Request
from semel.encoder.residency import Residency
from semel.lab.simulate.costs import Costs
from semel.lab.simulate.workload import Ask

__all__ = ["EngineLimits", "EngineModel", "Job", "Prompts"]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The sizes of an engine."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8_192
    """Of a step."""

    max_step_embeds: int = 16_384
    """Embeddings that are encoded in a step at the most: as many as the largest image has, as with vLLM."""

    encoder_embeds: int = 32_768
    """Embeddings that the encoder cache has room for."""

    prefix_tokens: int = 400_000
    block_tokens: int = 16
    """Tokens of the prefix cache, and of a block of it."""

    item_bytes: int = 4 << 30
    """Of the item cache."""


class Prompts:
    """The items' positions in prompts: a conversation's next prompt begins with its last one and the answer to it.

    What comes anew is behind that. If items that were shown are left out, everything is anew.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[Ask, tuple[Placeholder, ...]]] = {}

    def places(self, ask: Ask) -> tuple[Placeholder, ...]:
        """Return where a prompt's items are."""
        items, at = ask.items, 0
        kept: tuple[Placeholder, ...] = ()
        last, places = self._last.get(ask.conversation, (None, ()))
        if last is not None and items[: len(last.items)] == last.items:
            kept, at = places, last.prompt_tokens + last.answer_tokens
        new = items[len(kept) :]
        text = ask.prompt_tokens - at - sum(item.tokens for item in new)
        if text < 0:  # it is shorter than what it should begin with
            kept, at, new = (), 0, items
            text = max(0, ask.prompt_tokens - sum(item.tokens for item in new))
        at += text // 2
        for item in new:
            kept += (Placeholder(at, item.tokens),)
            at += item.tokens
        self._last[ask.conversation] = ask, kept
        return kept


class _Stretch(NamedTuple):
    """A part of a prompt: an item, or nothing at the very beginning, and the text behind it."""

    key: int
    """Of everything up to its item."""

    start: int
    end: int


class Job:
    """A request in an engine."""

    __slots__ = (
        "answer_tokens",
        "cached",
        "computed",
        "generated",
        "order",
        "released",
        "request",
        "stretches",
        "tokens",
    )

    def __init__(self, request: Request, tokens: int, answer_tokens: int, opening: int) -> None:
        self.request = request
        self.tokens = tokens
        """Of the prompt."""

        self.answer_tokens = answer_tokens
        self.generated = 0
        """Of the answer: kept up to date only when it begins and when it ends."""

        self.order = 0
        """Its place among all that its engine began."""

        self.computed = self.cached = 0
        self.released = 0
        """Items that are wholly computed: the first ones."""

        self.stretches = _stretches(request, tokens, opening)

    @classmethod
    def of(cls, ask: Ask, name: str, keys: Sequence[bytes], places: Sequence[Placeholder], *, salt: int = 0) -> Job:
        """Return the job of a request whose items have these digests and places."""
        request = Request(name, Timeline.decoder(places), list(keys))
        return cls(request, ask.prompt_tokens, ask.answer_tokens, hash((salt, ask.conversation)))


def _stretches(request: Request, tokens: int, opening: int) -> list[_Stretch]:
    """Return the parts of a prompt. Their keys are hashes of whole numbers: the same in every process."""
    placeholders = request.timeline[:]
    ends = [*(placeholder.offset for placeholder in placeholders), tokens]
    found = [_Stretch(opening, 0, ends[0])]
    for key, placeholder, end in zip(request.keys, placeholders, ends[1:], strict=True):
        found.append(_Stretch(hash((found[-1].key, _number(key))), placeholder.offset, end))
    return found


def _number(key: Hashable) -> int:
    return int.from_bytes(key[:7], "big") if isinstance(key, bytes) else hash(key)


class EngineModel:
    """Continuous batching: `begin` a step, which takes so long, and `finish` it.

    Every answer that has begun gets a token in each step. So its last step is known from its first one, and a step
    costs the prompts in it and the answers that end with it, not the batch.
    """

    def __init__(self, costs: Costs, limits: EngineLimits | None = None) -> None:
        self.limits = limits or EngineLimits()
        self.slowness = 1.0
        """How many times as long everything takes."""

        self.steps = self.encodes = self.items = self.prefix_hits = 0
        self.residency = Residency(self.limits.encoder_embeds)
        self._costs = costs
        self._max_embeds = min(self.limits.max_step_embeds, self.limits.encoder_embeds)
        self._planner = Planner(self.residency)
        self._prefixes: LruMap[int, tuple[int, int]] = LruMap(self.limits.prefix_tokens, lambda one: one[1] - one[0])
        """By the key of a stretch, the positions that are cached of it."""

        self._waiting: deque[Job] = deque()
        self._prefilling: dict[Job, None] = {}
        """Those whose prompts are not computed yet, in their order."""

        self._answering: dict[Job, None] = {}
        self._ends: list[tuple[int, int, Job]] = []
        """A heap of the answers' last steps. Those that were given up are still in it."""

        self._chunks: list[tuple[Job, int]] = []
        """The prompts in the step that has begun, and how many tokens are computed of each."""

        self._begun = 0

    @property
    def jobs(self) -> int:
        """Requests that wait or run."""
        return len(self._waiting) + len(self._prefilling) + len(self._answering)

    @property
    def encoder_hits(self) -> int:
        """Items that did not have to be encoded: their output was there, or a prefix had them."""
        return self.items - self.encodes

    @property
    def answering(self) -> KeysView[Job]:
        """The requests whose answers have begun: a step brings each of them a token."""
        return self._answering.keys()

    def add(self, job: Job) -> None:
        """A request has come."""
        for one in job.request.timeline:
            if one.num_embeds > self._max_embeds:
                raise ValueError(f"an image of {one.num_embeds:,} embeddings can never be encoded here")
        self._waiting.append(job)

    def remove(self, job: Job) -> None:
        """A request is given up."""
        if job in self._answering:
            self._end(job)
        elif job in self._prefilling:
            del self._prefilling[job]
            self.residency.release_all(job.request.id)
        elif job in self._waiting:
            self._waiting.remove(job)

    def begin(self) -> float | None:
        """Schedule a step. Returns how long it takes; None if there is nothing to do."""
        if not self.jobs:
            return None
        limits, answers = self.limits, len(self._answering)
        budget, embeds, before = limits.max_num_batched_tokens, limits.max_step_embeds, self.encodes
        self._chunks = []
        for job in self._prefilling:
            room = budget - sum(one.order < job.order for one in self._answering)
            tokens, embeds = self._plan(job, min(job.tokens - job.computed, room), embeds)
            budget -= tokens
        budget -= answers
        while self._waiting and budget > 0 and answers + len(self._prefilling) < limits.max_num_seqs:
            job = self._waiting[0]
            if not job.computed:
                self._find_prefix(job)
            tokens, embeds = self._plan(job, min(job.tokens - job.computed, budget), embeds)
            if not tokens:
                break
            budget -= tokens
            self._prefilling[self._waiting.popleft()] = None
            self._begun += 1
            job.order = self._begun
            self.items += len(job.request.keys)
            self.prefix_hits += job.cached > 0
        seconds = self._costs.step_s(answers + len(self._chunks))
        if self._chunks:
            self.residency.settle()
            seconds += self._costs.prefill_s(limits.max_num_batched_tokens - answers - budget)
        if self.encodes > before:
            seconds += self._costs.encode_s(limits.max_step_embeds - embeds)
        return self.slowness * seconds

    def finish(self) -> list[Job]:
        """The step is over. Returns the requests whose answers begin or end with it, in their order."""
        self.steps += 1
        changed = []
        for job, tokens in self._chunks:
            if job not in self._prefilling:
                continue  # it was given up meanwhile
            self._advance(job, tokens)
            if job.computed >= job.tokens:
                del self._prefilling[job]
                self._answering[job] = None
                job.generated = 1
                heappush(self._ends, (self.steps + job.answer_tokens - 1, job.order, job))
                changed.append(job)
        self._chunks = []
        while self._ends and self._ends[0][0] <= self.steps:
            job = heappop(self._ends)[2]
            if job not in self._answering:
                continue
            self._end(job)
            if job.answer_tokens > 1:
                job.generated = job.answer_tokens
                changed.append(job)
        changed.sort(key=lambda job: job.order)
        return changed

    def _end(self, job: Job) -> None:
        del self._answering[job]
        self.residency.release_all(job.request.id)

    def _plan(self, job: Job, tokens: int, embeds: int) -> tuple[int, int]:
        """Plan the tokens of a prompt that are computed in this step, and the embeddings that may yet be encoded."""
        if tokens <= 0:
            return 0, embeds
        if job.released < len(job.request.keys):
            plan = self._planner.plan(job.request, computed=job.computed, tokens=tokens, budget=embeds)
            if plan.conflict is not None or plan.tokens <= 0:
                return 0, embeds
            self._planner.commit(job.request, plan)
            self.encodes += len(plan.encodes)
            tokens, embeds = plan.tokens, plan.budget
        self._chunks.append((job, tokens))
        return tokens, embeds

    def _advance(self, job: Job, tokens: int) -> None:
        job.computed += tokens
        passed, _ = job.request.timeline.window(job.computed, job.computed)
        for index in range(job.released, passed):
            self.residency.release(job.request.id, index)
        job.released = passed
        if job.computed >= job.tokens:
            last = job.stretches[-1]
            for one in job.stretches:
                end = one.end + (job.answer_tokens if one is last else 0)
                if self._prefixes.get(one.key) != (one.start, end):
                    self._prefixes.put(one.key, (one.start, end))

    def _find_prefix(self, job: Job) -> None:
        """Begin behind what the prefix cache has: whole blocks, and never all of a prompt."""
        found = 0
        for one in job.stretches:
            if (cached := self._prefixes.get(one.key)) is None or cached[0] != one.start:
                break
            found = min(cached[1], one.end)
            if found < one.end:
                break
        block = self.limits.block_tokens
        job.cached = job.computed = min(found, job.tokens - 1) // block * block
        job.released, _ = job.request.timeline.window(job.computed, job.computed)
