"""A modelled engine: what it keeps and when it steps are those of vLLM with semel; only times are guesses (`Costs`).

Pure: it has the shipped `Residency` and `Planner` for encoder outputs, a prefix cache, and continuous batching with
chunked prefill. `served_engine` puts it behind the `Engine` protocol.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from semel.core import LruMap, Placeholder, Timeline
from semel.encoder import Planner, Request, Residency
from semel.simulate.costs import Costs
from semel.simulate.workload import Ask

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
    """Where the items of each prompt are: a conversation's next prompt begins with its last one and the answer to it.

    What comes anew is behind that. If items that were shown are left out, everything is anew.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[Ask, tuple[int, ...]]] = {}

    def places(self, ask: Ask) -> tuple[int, ...]:
        """The offsets of a prompt's items."""
        items, at = ask.items, 0
        kept: tuple[int, ...] = ()
        last, offsets = self._last.get(ask.conversation, (None, ()))
        if last is not None and items[: len(last.items)] == last.items:
            kept, at = offsets, last.prompt_tokens + last.answer_tokens
        new = items[len(kept) :]
        text = ask.prompt_tokens - at - sum(item.tokens for item in new)
        if text < 0:  # it is shorter than what it should begin with
            kept, at, new = (), 0, items
            text = max(0, ask.prompt_tokens - sum(item.tokens for item in new))
        at += text // 2
        places = list(kept)
        for item in new:
            places.append(at)
            at += item.tokens
        self._last[ask.conversation] = ask, tuple(places)
        return tuple(places)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A part of a prompt: an item, or nothing at the very beginning, and the text behind it."""

    key: int
    """Of everything up to its item."""

    start: int
    end: int


class Job:
    """A request in an engine."""

    __slots__ = ("answer_tokens", "cached", "computed", "generated", "released", "request", "stretches", "tokens")

    def __init__(self, request: Request, tokens: int, answer_tokens: int, opening: int) -> None:
        self.request = request
        self.tokens = tokens
        """Of the prompt."""

        self.answer_tokens = answer_tokens
        self.computed = self.generated = self.cached = self.released = 0
        self.stretches = _stretches(request, tokens, opening)

    @classmethod
    def of(cls, ask: Ask, name: str, keys: Sequence[bytes], places: Sequence[int], *, salt: int = 0) -> Job:
        """The job of a request whose items have these digests and places."""
        pairs = zip(places, ask.items, strict=True)
        timeline = Timeline.decoder(Placeholder(place, item.tokens) for place, item in pairs)
        opening = hash((salt, ask.conversation))
        return cls(Request(name, timeline, list(keys)), ask.prompt_tokens, ask.answer_tokens, opening)


def _stretches(request: Request, tokens: int, opening: int) -> list[_Stretch]:
    """The parts of a prompt. Their keys are hashes of whole numbers: the same in every process."""
    placeholders = request.timeline[:]
    ends = [*(placeholder.offset for placeholder in placeholders), tokens]
    found = [_Stretch(opening, 0, ends[0])]
    for key, placeholder, end in zip(request.keys, placeholders, ends[1:], strict=True):
        found.append(_Stretch(hash((found[-1].key, _number(key))), placeholder.offset, end))
    return found


def _number(key: Hashable) -> int:
    return int.from_bytes(key[:7], "big") if isinstance(key, bytes) else hash(key)


class EngineModel:
    """Continuous batching: `begin` a step, which takes so long, and `finish` it."""

    def __init__(self, costs: Costs, limits: EngineLimits | None = None) -> None:
        self.limits = limits or EngineLimits()
        self.slowness = 1.0
        """How many times as long everything takes."""

        self.steps = self.encodes = self.items = self.prefix_hits = 0
        self.residency = Residency(self.limits.encoder_embeds)
        self._costs = costs
        self._planner = Planner(self.residency)
        self._prefixes: LruMap[int, tuple[int, int]] = LruMap(self.limits.prefix_tokens, lambda one: one[1] - one[0])
        """By the key of a stretch, the positions that are cached of it."""

        self._waiting: deque[Job] = deque()
        self._running: dict[Job, None] = {}
        self._step: list[tuple[Job, int]] = []

    @property
    def jobs(self) -> int:
        """Requests that wait or run."""
        return len(self._waiting) + len(self._running)

    @property
    def encoder_hits(self) -> int:
        """Items that did not have to be encoded: their output was there, or a prefix had them."""
        return self.items - self.encodes

    def add(self, job: Job) -> None:
        """A request has come."""
        most = max((one.num_embeds for one in job.request.timeline), default=0)
        if most > min(self.limits.max_step_embeds, self.limits.encoder_embeds):
            raise ValueError(f"an image of {most:,} embeddings can never be encoded here")
        self._waiting.append(job)

    def remove(self, job: Job) -> None:
        """A request has ended, or is given up."""
        if job in self._running:
            del self._running[job]
            self.residency.release_all(job.request.id)
        elif job in self._waiting:
            self._waiting.remove(job)

    def begin(self) -> float | None:
        """Schedule a step. Returns how long it takes; None if there is nothing to do."""
        if not self._running and not self._waiting:
            return None
        limits = self.limits
        budget, embeds = limits.max_num_batched_tokens, limits.max_step_embeds
        self._step = []
        prefilled = 0
        before = self.encodes
        encoded = 0
        for job in self._running:
            missing = job.tokens - job.computed
            if missing <= 0:
                budget -= 1
                self._step.append((job, 0))
                continue
            tokens, left = self._plan(job, min(missing, budget), embeds)
            budget, encoded, embeds = budget - tokens, encoded + embeds - left, left
            prefilled += tokens
        while self._waiting and budget > 0 and len(self._running) < limits.max_num_seqs:
            job = self._waiting[0]
            if not job.computed:
                self._find_prefix(job)
            tokens, left = self._plan(job, min(job.tokens - job.computed, budget), embeds)
            if not tokens:
                break
            self._running[self._waiting.popleft()] = None
            self.items += len(job.request.keys)
            self.prefix_hits += job.cached > 0
            budget, encoded, embeds = budget - tokens, encoded + embeds - left, left
            prefilled += tokens
        self.residency.settle()
        costs, batch = self._costs, len(self._step)
        seconds = costs.step_s(batch) + costs.prefill_s(prefilled)
        if self.encodes > before:
            seconds += costs.encode_s(encoded)
        return self.slowness * seconds

    def finish(self) -> list[Job]:
        """The step is over. Returns the requests that have one more token; those that are complete have left."""
        self.steps += 1
        generated = []
        for job, tokens in self._step:
            if job not in self._running:
                continue  # it was given up meanwhile
            if tokens:
                self._advance(job, tokens)
                if job.computed < job.tokens:
                    continue
            job.generated += 1
            generated.append(job)
            if job.generated >= job.answer_tokens:
                self.remove(job)
        self._step = []
        return generated

    def _plan(self, job: Job, tokens: int, embeds: int) -> tuple[int, int]:
        """How many tokens of a prompt are computed in this step, and the embeddings that may yet be encoded in it."""
        if tokens <= 0:
            return 0, embeds
        if job.request.keys:
            plan = self._planner.plan(job.request, computed=job.computed, tokens=tokens, budget=embeds)
            if plan.conflict is not None or plan.tokens <= 0:
                return 0, embeds
            self._planner.commit(job.request, plan)
            self.encodes += len(plan.encodes)
            tokens, embeds = plan.tokens, plan.budget
        self._step.append((job, tokens))
        return tokens, embeds

    def _advance(self, job: Job, tokens: int) -> None:
        job.computed += tokens
        timeline = job.request.timeline
        while job.released < len(timeline) and timeline[job.released].end <= job.computed:
            self.residency.release(job.request.id, job.released)
            job.released += 1
        if job.computed >= job.tokens:
            last = job.stretches[-1]
            for one in job.stretches:
                end = one.end + (job.answer_tokens if one is last else 0)
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
