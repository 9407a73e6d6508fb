"""The fast code and the slow model, driven side by side with whatever hypothesis thinks of.

`ResidencyMachine` calls residency in any order (B1-B9). `EngineMachine` plays a scheduler and a worker around planner
and residency (C1-C4): requests come, are chunked, preempted in the very pass that planned for them, aborted; the worker
drops and encodes what it is told, and must then find every embedding that its step needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from semel.core import Mask, Placeholder, Timeline
from semel.encoder.eviction import CostAware, Eviction, Immediate, Key, OldestReleased
from semel.encoder.gather import gather
from semel.encoder.plan import Plan, Planner, Request
from semel.encoder.residency import Residency
from tests.effort import examples
from tests.encoder.model import SlowPlanner, SlowResidency

REQUESTS = st.sampled_from("abc")
INDICES = st.integers(0, 1)
KEYS = st.sampled_from(range(5))


def size_of(key: Key) -> int:
    return 1 + hash(key) % 4


class ResidencyMachine(RuleBasedStateMachine):
    @initialize(capacity=st.integers(0, 12), keeps_released=st.booleans())
    def start(self, capacity: int, keeps_released: bool) -> None:
        self.fast = Residency(capacity, OldestReleased() if keeps_released else Immediate())
        self.slow = SlowResidency(capacity, keeps_released)
        self.keys: dict[tuple[str, int], Key] = {}

    @rule(request=REQUESTS, index=INDICES, key=KEYS)
    def refer(self, request: str, index: int, key: Key) -> None:
        """Refer to an entry, or allocate it where there is room; an input keeps the key it had first."""
        key = self.keys.setdefault((request, index), key)
        size = size_of(key)
        assert self.fast.size(key) == self.slow.sizes.get(key)
        if key in self.slow.sizes:
            self.fast.hold(request, index, key)
            self.slow.hold(request, index, key)
        elif self.fast.can_allocate(size):
            self.fast.allocate(request, index, key, size)
            self.slow.allocate(request, index, key, size)
        else:
            assert size > self.slow.free + self.slow.reclaimable

    @rule(request=REQUESTS, index=INDICES)
    def release(self, request: str, index: int) -> None:
        self.fast.release(request, index)
        self.slow.release(request, index)

    @rule(request=REQUESTS)
    def release_all(self, request: str) -> None:
        self.fast.release_all(request)
        self.slow.release_all(request)

    @rule()
    def settle(self) -> None:
        assert self.fast.settle() == self.slow.settle()

    @rule(key=KEYS)
    def discard(self, key: Key) -> None:
        """Between passes, as vLLM's scheduler hears of a wrong output; its tensor goes even if the key comes back."""
        self.settle()
        self.fast.discard(key)
        self.slow.discard(key)
        assert self.fast.size(key) is None

    @rule()
    def reset(self) -> None:
        self.fast.reset()
        self.slow.reset()

    @invariant()
    def agree(self) -> None:
        fast, slow = self.fast, self.slow
        assert (fast.free, fast.reclaimable) == (slow.free, slow.reclaimable)
        assert 0 <= fast.free <= fast.capacity
        assert {request: set(fast.held_inputs(request)) for request in "abc"} == {r: slow.held_inputs(r) for r in "abc"}
        counts = (fast.counts.queries, fast.counts.hits, fast.counts.evictions)
        assert counts == (slow.queries, slow.hits, slow.evictions)


@dataclass
class Running:
    """A request in the machine's scheduler."""

    request: Request
    length: int
    computed: int = 0


@st.composite
def prompts(draw: st.DrawFn) -> tuple[Timeline, tuple[int, ...], int]:
    """A timeline over a few keys, adjacent or apart, some masked. Equal keys have equal layouts, as digests have."""
    keys = tuple(draw(st.lists(KEYS, min_size=1, max_size=6)))
    placeholders, position = [], 0
    for key in keys:
        position += draw(st.integers(0, 2))
        bits = [True] * size_of(key) + [False] * (key % 3)
        mask = Mask(bits[::-1] if key % 2 else bits) if key % 3 else None
        placeholders.append(Placeholder(position, len(bits), mask))
        position += len(bits)
    return Timeline.decoder(placeholders), keys, position + draw(st.integers(1, 3))


class EngineMachine(RuleBasedStateMachine):
    """One rule is one pass of a scheduler, with its execution; the others are what happens between passes."""

    @initialize(
        capacity=st.integers(4, 16),
        shift=st.integers(0, 2),
        chunks_items=st.booleans(),
        is_encoder_decoder=st.booleans(),
        cost_aware=st.booleans(),
        remote=st.sets(KEYS, max_size=2),
    )
    def start(
        self,
        capacity: int,
        shift: int,
        chunks_items: bool,
        is_encoder_decoder: bool,
        cost_aware: bool,
        remote: set[int],
    ) -> None:
        self.is_encoder_decoder = is_encoder_decoder
        eviction: Eviction = Immediate() if is_encoder_decoder else CostAware() if cost_aware else OldestReleased()
        # The slow model knows no costs: a cost-aware run is held to the worker only.
        self.slow = None if cost_aware and not is_encoder_decoder else SlowResidency(capacity, not is_encoder_decoder)
        self.fast = Residency(capacity, eviction)
        self.planner = Planner(self.fast, shift, chunks_items, remote.__contains__)
        self.slow_planner = self.slow and SlowPlanner(self.slow, shift, chunks_items, remote.__contains__)
        self.running: dict[str, Running] = {}
        self.tensors: set[Key] = set()
        self.arrivals = 0

    @rule(burst=st.lists(prompts(), min_size=1, max_size=3), prefix=st.integers(0, 4))
    def arrive(self, burst: list[tuple[Timeline, tuple[int, ...], int]], prefix: int) -> None:
        for timeline, keys, length in burst:
            self.admit(timeline, keys, length, prefix)

    def admit(self, timeline: Timeline, keys: tuple[int, ...], length: int, prefix: int) -> None:
        """Admit a request, of which a prefix cache may have some tokens."""
        self.arrivals += 1
        name = f"r{self.arrivals}"
        if self.is_encoder_decoder:
            encoder = Timeline.encoder(replace(p, offset=0) for p in timeline)
            own_keys = [(key, name, index) for index, key in enumerate(keys)]
            self.running[name] = Running(Request(name, encoder, own_keys), 3)
        else:
            self.running[name] = Running(Request(name, timeline, keys), length, min(prefix, length - 1))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), budget=st.integers(4, 16))
    def step(self, data: st.DataObject, budget: int) -> None:
        scheduled: dict[str, Plan] = {}
        for name in data.draw(st.permutations(sorted(self.running)), label="order"):
            fate = data.draw(st.sampled_from(["schedule", "schedule", "preempt another", "no memory"]), label="fate")
            running = self.running[name]
            left = running.length - running.computed
            tokens = data.draw(st.one_of(st.just(left), st.integers(0, left)), label="tokens")
            plan = self.plan(running, tokens, budget)
            if plan.tokens == 0 or fate == "no memory":
                continue
            if fate == "preempt another" and scheduled:
                victim = data.draw(st.sampled_from(sorted(scheduled)), label="victim")
                budget += sum(self.size(victim, index) for index in scheduled.pop(victim).encodes)
                self.release(victim)
                self.running[victim].computed = 0
                plan = self.plan(running, tokens, budget)
                if plan.tokens == 0:
                    continue
            self.commit(running, plan)
            scheduled[name] = plan
            budget = plan.budget
        self.execute(scheduled)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[name]
        self.release(name)

    @precondition(lambda self: self.running)
    @rule()
    def change_weights(self) -> None:
        self.tensors.clear()
        self.fast.reset()
        if self.slow:
            self.slow.reset()

    @invariant()
    def free_space_stays_within_the_capacity(self) -> None:
        assert 0 <= self.fast.free <= self.fast.capacity
        assert 0 <= self.fast.reclaimable <= self.fast.capacity - self.fast.free
        if self.slow:
            assert (self.fast.free, self.fast.reclaimable) == (self.slow.free, self.slow.reclaimable)

    def plan(self, running: Running, tokens: int, budget: int) -> Plan:
        plan = self.planner.plan(running.request, computed=running.computed, tokens=tokens, budget=budget)
        if self.slow_planner:
            expected = self.slow_planner.plan(running.request, running.computed, tokens, budget)
            assert replace(plan, cut=None) == expected
        return plan

    def commit(self, running: Running, plan: Plan) -> None:
        self.planner.commit(running.request, plan)
        if not self.slow:
            return
        request = running.request
        for index in plan.hits:
            self.slow.hold(request.id, index, request.keys[index])
        for index in plan.encodes + plan.loads:
            self.slow.allocate(request.id, index, request.keys[index], request.timeline[index].num_embeds)
        for index in plan.repeats:
            self.slow.hold(request.id, index, request.keys[index])

    def execute(self, scheduled: dict[str, Plan]) -> None:
        settlement = self.fast.settle()
        if self.slow:
            assert settlement == self.slow.settle()
        self.tensors.difference_update(settlement.evicted)
        for name, plan in scheduled.items():
            self.tensors.update(self.running[name].request.keys[index] for index in plan.encodes + plan.loads)
        self.tensors.update(self.running[name].request.keys[index] for name, index in settlement.taken_over)
        for name, plan in scheduled.items():
            running = self.running[name]
            for index in self.needed(running, plan.tokens):
                assert running.request.keys[index] in self.tensors, "B7: told resident, but nobody encoded it"
        for name, plan in scheduled.items():
            self.advance(self.running[name], plan.tokens)

    def needed(self, running: Running, tokens: int) -> Iterator[int]:
        timeline, computed = running.request.timeline, running.computed
        if timeline.is_encoder:
            yield from range(len(timeline) if computed == 0 else 0)
        else:
            end = computed + tokens + self.planner.shift
            yield from (piece.index for piece in gather(timeline, computed, end).slices)

    def advance(self, running: Running, tokens: int) -> None:
        running.computed += tokens
        request = running.request
        passed = running.computed - self.planner.shift
        for index in list(self.fast.held_inputs(request.id)):
            if request.timeline.is_encoder or request.timeline[index].end <= passed:
                self.fast.release(request.id, index)
                if self.slow:
                    self.slow.release(request.id, index)
        if running.computed == running.length:
            del self.running[request.id]
            self.release(request.id)

    def release(self, name: str) -> None:
        self.fast.release_all(name)
        if self.slow:
            self.slow.release_all(name)

    def size(self, name: str, index: int) -> int:
        return self.running[name].request.timeline[index].num_embeds


def drive(machine: type[RuleBasedStateMachine], runs: int) -> None:
    slow_is_fine = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=runs, stateful_step_count=50, deadline=None, suppress_health_check=slow_is_fine, database=None
        ),
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("runs", [examples(30), pytest.param(150, marks=pytest.mark.slow)])
def test_b_residency_does_what_the_slow_model_does(runs: int) -> None:
    drive(ResidencyMachine, runs)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("runs", [examples(30), pytest.param(200, marks=pytest.mark.slow)])
def test_b_and_c_a_worker_finds_every_embedding_that_its_step_needs(runs: int) -> None:
    drive(EngineMachine, runs)
