"""S27: grammars that are expensive to follow, in vLLM's real scheduler, stepped by hand, with two tenants.

The grammars are fakes that burn CPU time as xgrammar does: with the interpreter let go. The wrong implementation is
vLLM's own: the whole batch waits for the slowest (`stock`).
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from semel.core import Tenant
from semel.engine.vllm.compat.internals import LAZY_TRANSFER_SCHEDULER, PLAIN_SCHEDULER
from semel.engine.vllm.grammars.lane import Lane, Overdue
from semel.engine.vllm.grammars.limits import BUSY, EXPENSIVE
from semel.engine.vllm.grammars.meter import FollowingAccounts
from semel.lab.bench.stepping import Kind, Stepper
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.alone, pytest.mark.timeout(300)]

MALLORY, ALICE = (Tenant(name).prefix_salt for name in ("mallory", "alice"))
MS = 1_000_000


def burn(cpu_s: float) -> None:
    """Use CPU time of this thread, without the interpreter."""
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 2_000)


def burn_in_one_call(rounds: int = 4_000_000) -> None:
    """Use a second or so in one call, as xgrammar does."""
    hashlib.pbkdf2_hmac("sha256", b"password", b"salt", rounds)


class Grammar:
    """A grammar that takes what it is told to for each mask."""

    def __init__(self, fill: Callable[[], None] = lambda: None, *, accepts: bool = True) -> None:
        self.fill = fill
        self.accepts = accepts
        self.fills = 0
        self.tokens: list[int] = []

    def accept_tokens(self, _: str, tokens: list[int]) -> bool:
        self.tokens += tokens
        return self.accepts

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        self.fill()
        return tokens

    def rollback(self, num_tokens: int) -> None:
        del self.tokens[-num_tokens:]

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        self.fill()
        self.fills += 1
        bitmask[batch_index] = 2

    def is_terminated(self) -> bool:
        return False

    def reset(self) -> None:
        self.tokens.clear()


class Core:
    """An engine core without a model: each request gets the same token in every step."""

    def __init__(self, stepper: Stepper) -> None:
        import torch

        self.stepper = stepper
        self.scheduler = stepper.scheduler
        self.scheduler.structured_output_manager.backend = SimpleNamespace(
            allocate_token_bitmask=lambda rows: torch.zeros((rows, 32), dtype=torch.int32)
        )
        self.ended: dict[str, object] = {}
        self.tokens: dict[str, int] = {}

    def add(self, name: str, tenant: str | None, grammar: Grammar | None = None, tokens: int = 1_000) -> None:
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams
        from vllm.v1.request import Request

        outputs = None if grammar is None else StructuredOutputsParams(regex="a")
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, structured_outputs=outputs)
        request = Request(name, [0] * 4, params, None, cache_salt=tenant)
        if grammar is not None:
            request.structured_output_request.grammar = grammar
        self.scheduler.add_request(request)

    def step(self) -> set[str]:
        """Make a step; the requests in it."""
        step = self.stepper.plan()
        self.scheduler.get_grammar_bitmask(step.output)
        outputs = self.scheduler.update_from_output(step.output, self.stepper.result(step))
        for output in (output for of_client in outputs.values() for output in of_client.outputs):
            self.tokens[output.request_id] = self.tokens.get(output.request_id, 0) + len(output.new_token_ids)
            if output.finish_reason is not None:
                self.ended[output.request_id] = output.stop_reason
        return set(step.output.num_scheduled_tokens)

    @property
    def following(self) -> Any:
        return self.scheduler._following


MakeCore = Callable[..., Core]


@pytest.fixture
def make(tiny: Callable[[str], Path]) -> Iterator[MakeCore]:
    from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

    StructuredOutputGrammar.register(Grammar)
    yield lambda kind="planning", **options: Core(Stepper.create(kind, tiny("qwen2-vl"), **options))


def test_a_lane_gives_back_results_and_errors_and_counts_cpu_time_not_time_S27() -> None:
    lane = Lane(0.05)
    owner = SimpleNamespace(tenant="mallory")
    assert lane.run(lambda: lane.call(owner, lambda: 7)[0]) == 7
    with pytest.raises(ZeroDivisionError):
        lane.run(lambda: 1 // 0)
    lane.run(lambda: lane.call(owner, time.sleep, 0.3))  # a machine under load is no verdict
    _, cpu_ns = lane.run(lambda: lane.call(owner, burn, 0.02))
    assert 20 * MS <= cpu_ns < 50 * MS
    assert lane.abandoned() == 0


async def test_an_overdue_call_is_left_behind_and_touches_nothing_afterwards_S27() -> None:
    lane, later = Lane(0.05), []
    owner = SimpleNamespace(tenant="mallory")

    def work() -> None:
        lane.call(owner, burn_in_one_call)
        later.append("it went on")

    began = time.thread_time()
    with pytest.raises(Overdue) as overdue:
        lane.run(work)
    assert overdue.value.owner is owner
    assert time.thread_time() - began < 0.2, "the caller only waits"
    assert (lane.abandoned("mallory"), lane.abandoned("alice")) == (1, 0)
    assert lane.run(threading.get_ident) != threading.get_ident()
    await until(lambda: lane.abandoned() == 0, within_s=60)
    assert later == []


@pytest.mark.parametrize("is_async", [False, True])
def test_a_request_whose_call_is_overdue_ends_alone_S27(make: MakeCore, is_async: bool) -> None:
    core = make(is_async=is_async)
    good, bad = Grammar(), Grammar(burn_in_one_call)
    core.add("alice", ALICE, good)
    core.add("mallory", MALLORY, bad)
    for _ in range(4):
        core.step()
    assert core.ended == {"mallory": EXPENSIVE}
    assert core.tokens["mallory"] == 0, "its token was of a mask with all bits set"
    assert core.tokens["alice"] == 4
    assert good.tokens == [1] * 3, "the fourth is accepted with the next mask"
    assert core.following.totals()["following_ended"] == 1


@pytest.mark.parametrize("kind", ["stock", "planning"])
def test_the_step_of_others_takes_the_deadline_and_with_vllm_alone_as_long_as_the_call_S27(
    make: MakeCore, kind: Kind
) -> None:
    core = make(kind)
    core.add("alice", ALICE)
    core.add("mallory", MALLORY, Grammar(partial(burn_in_one_call, 8_000_000)))
    step = core.stepper.plan()
    began = time.monotonic()
    thread_s = time.thread_time()
    core.scheduler.get_grammar_bitmask(step.output)
    spent_s = time.thread_time() - thread_s
    assert (spent_s > 0.4) == (kind == "stock"), f"{time.monotonic() - began:.2f} s"


async def test_two_lost_threads_are_all_that_a_tenant_gets_S27(make: MakeCore) -> None:
    core = make()
    for number in range(4):
        core.add(f"mallory {number}", MALLORY, Grammar(burn_in_one_call))
    core.add("alice", ALICE, Grammar())
    core.step()
    assert sorted(map(str, core.ended.values())) == sorted([EXPENSIVE, EXPENSIVE, BUSY, BUSY])
    assert core.following.totals()["following_abandoned"] <= 2
    core.add("late", MALLORY, Grammar())
    core.step()
    assert core.ended["late"] == BUSY
    assert "alice" not in core.ended
    await until(lambda: core.following.totals()["following_abandoned"] == 0, within_s=60)
    core.add("later", MALLORY, Grammar())
    await until(lambda: "later" in core.step(), within_s=60)  # once its tenant has paid for the two


def test_a_request_that_takes_a_second_more_than_5_ms_a_step_ends_and_one_below_does_not_S27(make: MakeCore) -> None:
    core = make()
    core.add("mallory", MALLORY, Grammar(lambda: burn(0.12)))
    core.add("honest", MALLORY, Grammar(lambda: burn(0.002)))
    steps = 0
    while "mallory" not in core.ended:
        core.step()
        steps += 1
        assert steps < 20
    assert core.ended == {"mallory": EXPENSIVE}
    assert steps >= 5


def test_a_tenant_s_expensive_requests_sit_steps_out_while_others_are_about_S27(make: MakeCore) -> None:
    core = make()
    core.add("mallory", MALLORY, Grammar(lambda: burn(0.04)))
    assert core.step() == core.step() == {"mallory"}, "alone it has every step"
    core.add("alice", ALICE)
    steps = [core.step() for _ in range(20)]
    assert all("alice" in step for step in steps)
    assert sum("mallory" in step for step in steps) <= 2
    core.add("waiting", MALLORY, Grammar())
    assert "waiting" not in core.step(), "each new request would have a free mask"
    core.add("plain", MALLORY)
    assert "plain" in core.step(), "a request without a grammar costs nothing"


def test_of_many_expensive_requests_a_few_run_in_a_step_each_in_its_turn_S27(make: MakeCore) -> None:
    core = make()
    now = [0]
    core.following._clock_ns = lambda: now[0]
    names = [f"mallory {number}" for number in range(8)]
    core.add("alice", ALICE)
    for name in names:
        core.add(name, MALLORY, Grammar(lambda: burn(0.03)))
    core.step()
    ran: list[str] = []
    for _ in range(8):
        now[0] += 5_000 * MS  # what they owe is paid
        of_step = core.step() - {"alice"}
        assert 1 <= len(of_step) <= 2
        ran += of_step
    assert len(set(ran)) == 8


def test_with_drafts_nobody_sits_out_and_the_most_expensive_request_ends_S27(make: MakeCore) -> None:
    core = make()
    core.following._sits_out = False
    core.add("alice", ALICE)
    for number in range(4):
        core.add(f"mallory {number}", MALLORY, Grammar(lambda: burn(0.1)))
    for _ in range(6):
        before = set(core.scheduler.requests)
        assert core.step() == before - core.ended.keys() | (before & core.ended.keys())
    assert BUSY in core.ended.values()
    assert "alice" not in core.ended


def test_drafts_are_checked_in_the_lane_as_well_S27(make: MakeCore) -> None:
    core = make()
    core.add("mallory", MALLORY, bad := Grammar())
    core.step()
    grammar = core.scheduler.requests["mallory"].structured_output_request.grammar
    assert type(grammar).__name__ == "Followed"
    assert grammar.validate_tokens([1, 2]) == [1, 2]
    bad.fill = burn_in_one_call
    assert grammar.validate_tokens([1, 2]) == []
    core.step()
    assert core.ended == {"mallory": EXPENSIVE}


def test_a_token_that_a_grammar_rejects_is_an_error_of_the_engine_and_not_of_its_cost_S27(make: MakeCore) -> None:
    core = make()
    core.add("mallory", MALLORY, Grammar(accepts=False))
    core.step()
    core.step()
    assert core.ended == {"mallory": None}
    assert core.following.totals()["following_ended"] == 0


def test_an_error_in_here_switches_it_off_and_the_engine_goes_on_S27(
    make: MakeCore, caplog: pytest.LogCaptureFixture
) -> None:
    core = make()
    core.add("alice", ALICE, grammar := Grammar())
    core.step()
    core.following._followed = None
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert core.step() == {"alice"}
    assert "grammars are followed without limits from now on" in caplog.text
    assert core.tokens["alice"] == 4
    assert grammar.tokens == [1] * 4, "in order, and none twice"


def test_a_debt_is_paid_with_a_fifth_of_the_time_and_only_counts_while_others_are_about_S27() -> None:
    accounts = FollowingAccounts()
    accounts.see("mallory", 0)
    accounts.charge("mallory", 100 * MS, 0)
    assert not accounts.is_over("mallory", 0), "there is nobody else"
    accounts.see("alice", 0)
    assert accounts.is_over("mallory", 0)
    assert not accounts.is_over("alice", 0)
    assert accounts.debt_ns("mallory", 250 * MS) == 50 * MS
    assert not accounts.is_over("mallory", 400 * MS)
    accounts.charge("mallory", 10**12, 0)
    assert accounts.is_over("mallory", 4_000 * MS)
    assert not accounts.is_over("mallory", 6_000 * MS), "nobody waits longer than five seconds"
    accounts.charge("mallory", 10**9, 11_000 * MS)
    assert not accounts.is_over("mallory", 11_000 * MS), "alice is gone"


@pytest.mark.parametrize(
    ("scheduler", "ended"), [(PLAIN_SCHEDULER, {}), (LAZY_TRANSFER_SCHEDULER, {"mallory": EXPENSIVE})]
)
def test_plain_vllm_with_semel_inside_follows_grammars_as_it_does_without(
    make: MakeCore, scheduler: str, ended: dict[str, str]
) -> None:
    core, bad = make("cache", scheduler_cls=scheduler), Grammar(burn_in_one_call)
    core.add("mallory", MALLORY, bad)
    for _ in range(2):
        core.step()
    assert core.ended == ended
    assert core.scheduler.requests.keys() == {"mallory"} - ended.keys()
