"""The modelled engine against an obvious one, which looks at every request of its batch in every step."""

from __future__ import annotations

from random import Random

import pytest

from semel.core import Placeholder
from semel.lab.simulate.costs import MODELLED
from semel.lab.simulate.engine import EngineLimits, EngineModel, Job
from semel.lab.simulate.workload import Ask, digest_of, image

LIMITS = EngineLimits(max_num_seqs=6, max_num_batched_tokens=400, max_step_embeds=500, encoder_embeds=700)
"""So small that prompts are cut, pass each other for want of room for embeddings, and wait."""


class Obvious(EngineModel):
    """All requests are in one list, and each counts its own tokens."""

    def __init__(self) -> None:
        super().__init__(MODELLED, LIMITS)
        self.running: list[Job] = []

    def remove(self, job: Job) -> None:
        if job in self.running:
            self.running.remove(job)
            self.residency.release_all(job.request.id)
        elif job in self._waiting:
            self._waiting.remove(job)

    def begin(self) -> float | None:
        if not self.running and not self._waiting:
            return None
        budget, embeds, before = self.limits.max_num_batched_tokens, self.limits.max_step_embeds, self.encodes
        self._chunks, answers, prefilled = [], 0, 0
        for job in [*self.running, *self._waiting]:
            is_new = job not in self.running
            if is_new and (budget <= 0 or len(self.running) >= self.limits.max_num_seqs):
                break
            if is_new and not job.computed:
                self._find_prefix(job)
            if job.computed >= job.tokens:
                budget, answers = budget - 1, answers + 1
                continue
            tokens, embeds = self._plan(job, min(job.tokens - job.computed, budget), embeds)
            if is_new and not tokens:
                break
            if is_new:
                self.running.append(self._waiting.popleft())
            budget, prefilled = budget - tokens, prefilled + tokens
        self.residency.settle()
        encoded = self.limits.max_step_embeds - embeds if self.encodes > before else 0
        seconds = MODELLED.step_s(answers + len(self._chunks)) + MODELLED.prefill_s(prefilled)
        return seconds + MODELLED.encode_s(encoded)

    def finish(self) -> list[Job]:
        changed, chunks = [], dict(self._chunks)
        for job in list(self.running):
            if tokens := chunks.get(job, 0):
                self._advance(job, tokens)
            elif job.computed < job.tokens:
                continue
            if job.computed >= job.tokens:
                job.generated += 1
                if job.generated == 1 or job.generated >= job.answer_tokens:
                    changed.append(job)
                if job.generated >= job.answer_tokens:
                    self.remove(job)
        return changed


class AnswersFirst(EngineModel):
    """The control: all answers have their tokens before any prompt, whatever their order."""

    def finish(self) -> list[Job]:
        changed = super().finish()
        for job in changed:
            job.order = 0
        return changed


def steps(model: EngineModel, seed: int) -> list[tuple[float, list[tuple[str, int]]]]:
    """What every step takes, and whose answers begin and end with it, while requests come and are given up."""
    rng, jobs = Random(seed), list[Job]()
    found: list[tuple[float, list[tuple[str, int]]]] = []
    for number in range(60):
        items = [image(key, (224 + key % 2 * 224,) * 2) for key in rng.choices(range(12), k=rng.randint(0, 3))]
        places, at = list[Placeholder](), 10
        for item in items:
            places.append(Placeholder(at, item.tokens))
            at += item.tokens + 20
        ask = Ask(0.0, "", rng.randrange(15), tuple(items), at + rng.randint(1, 500), rng.choice((1, 2, 40)))
        job = Job.of(ask, str(number), [digest_of("", item.key) for item in items], places)
        jobs.append(job)
        model.add(job)
        for _ in range(rng.randrange(12)):
            if (seconds := model.begin()) is None:
                break
            if rng.random() < 0.1:
                model.remove(rng.choice(jobs[-6:]))
            found.append((round(seconds, 9), [(one.request.id, one.generated) for one in model.finish()]))
    while (seconds := model.begin()) is not None:
        found.append((round(seconds, 9), [(one.request.id, one.generated) for one in model.finish()]))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_steps_are_those_of_the_obvious_engine(seed: int) -> None:
    assert steps(EngineModel(MODELLED, LIMITS), seed) == steps(Obvious(), seed)


def test_the_order_of_answers_and_prompts_matters() -> None:
    def times(model: EngineModel, seed: int) -> list[float]:
        return [seconds for seconds, _ in steps(model, seed)]

    assert any(times(AnswersFirst(MODELLED, LIMITS), seed) != times(Obvious(), seed) for seed in range(20))
