"""Encoder outputs that were fetched for a request, over vLLM's real scheduler: loaded once, adopted, given back.

No engine process is started (`tiered`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from semel.core import Digest, Form, PrefetchedOutput
from semel.encoder.eviction import Key
from semel.encoder.prefetched import PrefetchedOutputs
from semel.engine.vllm.tier.prefetch_params import prefetch_params
from semel.lab.bench.stepping import Step, Stepper
from tests.engine.tiered import BLOCK_BYTES, FORM, ROWS, WIDTH, Make, Tiered, create, identifier, random_requests

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture
def make(tiny: Callable[[str], Path]) -> Make:
    return create(tiny)


def ask(
    tiered: Tiered, name: str, items: list[int], prefetched_outputs: tuple[PrefetchedOutput, ...] = ()
) -> list[str]:
    tiered.add(name, items, prefetched_outputs, max_new_tokens=1)
    wrong = []
    while tiered.scheduler.requests:
        wrong += tiered.step()
    return wrong


def fetched(tiered: Tiered, number: int, form: Form = FORM) -> PrefetchedOutput:
    staged = tiered.fetch(number, form)
    assert staged is not None
    return staged.prefetched


def test_what_was_fetched_is_loaded_adopted_and_given_back(make: Make) -> None:
    tiered = make(fleet=True)
    assert tiered.host is not None
    assert ask(tiered, "warm", [9]) == []
    assert ask(tiered, "first", [0], (fetched(tiered, 0),)) == []
    tiered.host.review()
    assert tiered.host.staged_blocks == 0
    for number in (1, 2, 3):  # three of them fit on the device
        assert ask(tiered, f"fill {number}", [number]) == []
    assert ask(tiered, "again", [0]) == []
    totals = tiered.totals
    assert (tiered.encodes, totals.tier_prefetched, totals.tier_loads) == (4, 1, 1)
    assert totals.tier_prefetched_bytes == ROWS * BLOCK_BYTES
    assert tiered.host.holds(Digest(bytes.fromhex(identifier(0))))


@pytest.mark.parametrize(
    "fault", ["rows", "width", "type", "epoch", "another item", "blocks of the host cache", "nonsense"]
)
def test_what_does_not_fit_is_encoded_and_its_blocks_are_given_back(make: Make, fault: str) -> None:
    from dataclasses import replace

    tiered = make(fleet=True)
    assert tiered.host is not None
    assert ask(tiered, "warm", [9]) == []
    forms: dict[str, Form] = {
        "rows": (ROWS - 1, WIDTH, "torch.float32"),
        "width": (ROWS, WIDTH // 2, "torch.float32"),
        "type": (ROWS, WIDTH, "torch.bfloat16"),
    }
    prefetched = fetched(tiered, 1 if fault == "another item" else 0, forms.get(fault, FORM))
    if fault == "epoch":
        tiered.change_weights()
        assert ask(tiered, "warm again", [8]) == []
    elif fault == "blocks of the host cache":
        prefetched = replace(prefetched, extents=((0, ROWS),))
    elif fault == "nonsense":
        prefetched = replace(prefetched, form=("ten", WIDTH, "torch.float32"))  # type: ignore[arg-type]
    before = tiered.encodes
    assert ask(tiered, "first", [0], (prefetched,)) == []
    assert (tiered.encodes - before, tiered.totals.tier_prefetched) == (1, 0)
    tiered.host.review()
    is_kept = fault in (
        "blocks of the host cache",
        "nonsense",
    )  # nobody writes that; who ends the request asks for them
    assert tiered.host.staged_blocks == (ROWS if is_kept else 0)


def test_a_form_that_this_engine_has_not_made_yet_is_not_loaded(make: Make) -> None:
    tiered = make(fleet=True)
    assert ask(tiered, "first", [0], (fetched(tiered, 0),)) == []
    assert (tiered.encodes, tiered.totals.tier_prefetched) == (1, 0)


def test_a_request_that_ends_before_it_is_scheduled_gives_back_what_came_for_it(make: Make) -> None:
    from vllm.v1.request import RequestStatus

    tiered = make(fleet=True)
    assert tiered.host is not None
    tiered.add("aborted", [0], (fetched(tiered, 0),))
    tiered.host.review()
    assert tiered.host.staged_blocks == ROWS
    tiered.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    tiered.host.review()
    assert tiered.host.staged_blocks == 0


def test_a_request_that_ends_while_ranks_load_gives_back_what_came_for_it_afterwards(make: Make) -> None:
    from vllm.v1.request import RequestStatus

    tiered = make(fleet=True)
    assert tiered.host is not None
    assert ask(tiered, "warm", [9]) == []
    tiered.add("aborted", [0], (fetched(tiered, 0),))
    step = tiered.stepper.plan()
    tiered.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    tiered.host.review()
    assert tiered.host.staged_blocks == ROWS, "ranks have yet to load it"
    copied = step.output.ec_connector_metadata.step
    reports = None
    for copies, tensors in zip(tiered.copies, tiered.tensors, strict=True):
        copies.load(copied, tensors)
        reports = copies.report(copied)
    assert reports is not None
    tiered.scheduler.ec_connector.books.take([reports])
    tiered.host.review()
    assert tiered.host.staged_blocks == 0


def test_a_prefix_that_covers_an_item_gives_back_what_came_for_it(make: Make) -> None:
    tiered = make(fleet=True, enable_prefix_caching=False)
    assert tiered.host is not None
    request = Stepper.request("a", [(identifier(0), 2, ROWS)], tokens=40)
    prefetched = fetched(tiered, 0)
    tiered.host.submit([prefetched])
    request.ec_transfer_params = prefetch_params([prefetched])
    books = tiered.scheduler.ec_connector.books
    for computed, expected in ((ROWS + 1, ROWS), (ROWS + 2, 0)):
        books.consider(request, computed)
        tiered.host.review()
        assert tiered.host.staged_blocks == expected


def test_new_weights_and_resets_reach_the_embedding_process(make: Make) -> None:
    from semel.engine.tier_events import Reset, Saved

    tiered = make(fleet=True)
    assert tiered.host is not None
    assert ask(tiered, "a", [0]) == []
    assert [type(event) for event in tiered.host.review()] == [Saved]
    cached_output = tiered.host.cached_output(Digest(bytes.fromhex(identifier(0))))
    assert cached_output is not None
    assert b"".join(cached_output.buffers) == tiered.encoded(identifier(0)).numpy().tobytes()
    tiered.scheduler.reset_encoder_cache()
    assert not cached_output.is_intact()
    assert tiered.host.review() == [Reset(new_weights=False)]
    assert (tiered.host.epoch, tiered.host.has_new_weights) == (1, False)
    tiered.copies[0].forget()
    assert ask(tiered, "b", [1]) == []
    assert (tiered.host.epoch, tiered.host.has_new_weights) == (2, True)
    assert tiered.host.review()[-1] == Reset(new_weights=True)


def test_a_step_without_items_says_nothing(make: Make) -> None:
    tiered = make(fleet=True)
    assert tiered.host is not None
    assert ask(tiered, "text", []) == []
    assert tiered.host.review() == []
    assert tiered.host._page.read(0) == ([], 0)


@pytest.mark.parametrize("is_broken", [False, True])
def test_mutant_blocks_that_are_given_back_too_early_are_seen(
    make: Make, monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    """What is done when its load is planned is written over before the ranks read it."""
    use = PrefetchedOutputs.use

    def early(self: PrefetchedOutputs, request: str, key: Key) -> PrefetchedOutput:
        prefetched = use(self, request, key)
        self.on_done(prefetched.lease)
        return prefetched

    if is_broken:
        monkeypatch.setattr(PrefetchedOutputs, "use", early)
    tiered = make(fleet=True)
    plan = tiered.stepper.plan

    def plan_and_scribble() -> Step:
        step = plan()
        tiered.scribble()
        return step

    monkeypatch.setattr(tiered.stepper, "plan", plan_and_scribble)
    assert bool(tiered.run(random_requests(0, 40))) is is_broken
    assert tiered.totals.tier_prefetched > 0
