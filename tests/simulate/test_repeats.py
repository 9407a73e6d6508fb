"""Causes of preprocessings that repeat another one: by their notes, in a simulated fleet, and in real frontends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from semel.lab.prove.counters import settled
from semel.lab.prove.processes import running_fleet
from semel.lab.simulate.processes import FleetSize
from semel.lab.simulate.repeats import Cause, Preprocessing, causes_of
from semel.lab.simulate.whole import Plan, run
from semel.lab.simulate.workload import Catalogue, Talks, Traffic
from tools.fleet.comparing import begin_noting, noted
from tools.fleet.driving import exchange
from tools.fleet.plan import Ask, body_of, draw_images

FIRST = Preprocessing("d", "a", 1.0, 2.0, is_announced=False)


@pytest.mark.parametrize(
    ("further", "cause"),
    [
        (Preprocessing("d", "b", 3.0, 4.0, is_announced=True), "other worker"),
        (Preprocessing("d", "b", 1.5, 2.5, is_announced=False), "same time"),
        (Preprocessing("d", "b", 2.1, 3.0, is_announced=False), "not announced"),
        (Preprocessing("d", "a", 3.0, 4.0, is_announced=True), "evicted"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_further_preprocessing_of_an_item_has_one_cause(further: Preprocessing, cause: Cause) -> None:
    other_item = further._replace(digest="e", began=0.5, ended=0.6)
    assert causes_of([further, FIRST, other_item]) == {cause: 1}


def test_the_causes_of_a_simulated_fleet_add_up_to_what_it_preprocessed_again() -> None:
    workload = Talks(Catalogue(images=40), Traffic(30.0, 4.0, answer_tokens=8))
    figures = run(Plan(workload, FleetSize(3, 3), seed=1))
    again = {name: count for name, count in figures.extra.items() if name.startswith("preprocessed again")}
    assert sum(again.values()) == figures.preprocessed - figures.distinct_items > 0
    alone = run(Plan(workload, FleetSize(1, 3), seed=1))
    assert alone.extra == {}, "the control: one frontend repeats nothing"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_frontend_notes_what_it_preprocesses_and_why_it_was_a_repetition(tiny: Callable[[str], Path]) -> None:
    with running_fleet(tiny("qwen2-vl"), workers=2, frontends=0, has_engines=False) as fleet:
        nodes = [begin_noting(fleet, "round_robin") for _ in range(2)]
        fleet.until_up()
        began = time.monotonic()
        body = body_of(Ask((0,), 0), draw_images(1))
        for node in (nodes[0], nodes[1], nodes[1]):  # its first worker, then again the first, then the second
            assert asyncio.run(exchange(node.url, body))[0] == 200
            settled(nodes, fleet.workers)
        assert [len(noted([node], began)) for node in nodes] == [1, 1]
        assert causes_of(noted(nodes, began)) == {"other worker": 1}
