"""Encoder outputs that were fetched for a request, over vLLM's real scheduler: loaded once, adopted, given back.

No engine process is started (`tiered`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from semel.core import Arrival, Digest, Form
from semel.encoder import Arrivals, Key
from semel.engine.vllm.tier.arrival_params import arrival_params
from semel.lab.bench.stepping import Step, Stepper
from tests.engine.tiered import BLOCK_BYTES, FORM, ROWS, WIDTH, Make, Tiered, create, identifier, random_requests

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture
def make(tiny: Callable[[str], Path]) -> Make:
    return create(tiny)


def ask(tiered: Tiered, name: str, items: list[int], arrivals: tuple[Arrival, ...] = ()) -> list[str]:
    tiered.add(name, items, arrivals, max_new_tokens=1)
    wrong = []
    while tiered.scheduler.requests:
        wrong += tiered.step()
    return wrong


def fetched(tiered: Tiered, number: int, form: Form = FORM) -> Arrival:
    staged = tiered.fetch(number, form)
    assert staged is not None
    return staged.arrival


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
    assert (tiered.encodes, totals.tier_arrivals, totals.tier_loads) == (4, 1, 1)
    assert totals.tier_arrival_bytes == ROWS * BLOCK_BYTES
    assert tiered.host.holds(Digest(bytes.fromhex(identifier(0))))


@pytest.mark.parametrize("fault", ["rows", "width", "type", "epoch", "another item", "blocks of the shelf", "nonsense"])
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
    arrival = fetched(tiered, 1 if fault == "another item" else 0, forms.get(fault, FORM))
    if fault == "epoch":
        tiered.change_weights()
        assert ask(tiered, "warm again", [8]) == []
    elif fault == "blocks of the shelf":
        arrival = replace(arrival, extents=((0, ROWS),))
    elif fault == "nonsense":
        arrival = replace(arrival, form=("ten", WIDTH, "torch.float32"))  # type: ignore[arg-type]
    before = tiered.encodes
    assert ask(tiered, "first", [0], (arrival,)) == []
    assert (tiered.encodes - before, tiered.totals.tier_arrivals) == (1, 0)
    tiered.host.review()
    is_kept = fault in ("blocks of the shelf", "nonsense")  # nobody writes that; who ends the request asks for them
    assert tiered.host.staged_blocks == (ROWS if is_kept else 0)


def test_a_form_that_this_engine_has_not_made_yet_is_not_loaded(make: Make) -> None:
    tiered = make(fleet=True)
    assert ask(tiered, "first", [0], (fetched(tiered, 0),)) == []
    assert (tiered.encodes, tiered.totals.tier_arrivals) == (1, 0)


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
    arrival = fetched(tiered, 0)
    tiered.host.submit([arrival])
    request.ec_transfer_params = arrival_params([arrival])
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
    shelved = tiered.host.shelved(Digest(bytes.fromhex(identifier(0))))
    assert shelved is not None
    assert b"".join(shelved.buffers) == tiered.encoded(identifier(0)).numpy().tobytes()
    tiered.scheduler.reset_encoder_cache()
    assert not shelved.is_intact()
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
    use = Arrivals.use

    def early(self: Arrivals, request: str, key: Key) -> Arrival:
        arrival = use(self, request, key)
        self.on_done(arrival.ticket)
        return arrival

    if is_broken:
        monkeypatch.setattr(Arrivals, "use", early)
    tiered = make(fleet=True)
    plan = tiered.stepper.plan

    def plan_and_scribble() -> Step:
        step = plan()
        tiered.scribble()
        return step

    monkeypatch.setattr(tiered.stepper, "plan", plan_and_scribble)
    assert bool(tiered.run(random_requests(0, 40))) is is_broken
    assert tiered.totals.tier_arrivals > 0
