"""Figures, costs and plots of simulated runs, and the command that shows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from semel.errors import ConfigError
from semel.lab.simulate.costs import MODELLED, Costs
from semel.lab.simulate.figures import Figures, Times
from semel.lab.simulate.workload import Ask, image
from tests.commands import invoke


def run(*arguments: str) -> str:
    done = invoke("simulate", "--rate", "8", "--seconds", "1", *arguments)
    assert done.exit_code == 0, done.output
    return done.output


def test_figures_count_items_and_turns_once() -> None:
    figures = Figures()
    for turn, items in enumerate(((1,), (1, 2), (1, 2, 2))):
        figures.ask(Ask(float(turn), "a", 7, tuple(map(image, items)), 10_000, 5))
    figures.ask(Ask(4.0, "b", 8, (image(1),), 10_000, 5))
    figures.encodes = 6
    found = figures.json()
    assert (found["requests"], found["items"], found["distinct_items"], found["later_turns"]) == (4, 7, 3, 2)
    assert found["encodes_per_item"] == 2.0
    assert list(found["loads"]) == ["max", "mean", "p50", "p95", "p99"]


def test_times_are_those_of_the_ordered_series() -> None:
    assert Times.of([]) == Times(0.0, 0.0, 0.0, 0.0, 0.0)
    times = Times.of([float(one) for one in reversed(range(100))])
    assert (times.mean, times.p50, times.p95, times.p99, times.max) == (49.5, 50.0, 95.0, 99.0, 99.0)


def test_costs_are_read_from_a_bench(tmp_path: Path) -> None:
    rows = {
        "again: 1024, stage parse, mean": 0.5,
        "again: 1024, stage first_token, mean": 16.0,
        "again: 1024, latency": 30.0,
        "again: 1024, what the image adds": 10.0,
        "again: HD, what the image adds": 12.0,
        "new: 1024, latency": 700.0,
        "render: 16 new images at a time with tensors, per image": 40.0,
    }
    report = {"rows": [{"name": name, "unit": "ms", "semel": {"value": value}} for name, value in rows.items()]}
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(report))
    costs = Costs.of_bench(path)
    assert costs.parse_s == pytest.approx(0.0005)
    assert costs.process_s(image(1, (1024, 1024))) == pytest.approx(0.040)
    assert costs.encode_s(1_369) == pytest.approx(0.630)
    assert costs.prefill_s(2_691 - 1_369) == pytest.approx(0.002)
    assert costs.render_s == MODELLED.render_s
    path.write_text("[]")
    with pytest.raises(ConfigError, match="bench serve"):
        Costs.of_bench(path)


@pytest.mark.slow
def test_a_run_is_a_table_json_or_plots(tmp_path: Path) -> None:
    assert "encodes, for each image" in run("--compare")
    report = json.loads(
        run("--json", "--plot", str(tmp_path), "--compare", "--cells", "2", "--cells-by", "conversation")
    )
    assert set(report["figures"]) == {"semel", "round robin"}
    assert report["simulate"]["cells"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first_token.png", "loads.png", "work.png"]


def test_requests_can_be_recorded_and_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "asks.jsonl"
    assert "requests in" in run("--record", str(path))
    ours, again = (json.loads(run("--json", *more))["figures"] for more in ((), ("--workload", str(path))))
    assert ours == again


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fault", "melted:worker=1"], "no kind 'melted'"),
        (["--fault", "broken:worker=1,when=3"], "has no 'when'"),
        (["--fault", "broken:worker=1"], "give at_s, for_s"),
        (["--fault", "broken:worker=one"], "no value for worker"),
        (["--fault", "blip:worker=1,at_s=1"], "--level whole"),
        (["--cells", "9"], "every cell needs"),
        (["--cells", "2", "--fault", "join:at_s=1"], "leave out --cells"),
        (["--workload", "nothing"], "neither a file nor"),
        (["--costs", "nowhere.json"], "nowhere.json"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], message: str) -> None:
    done = invoke("simulate", "--seconds", "2", *arguments)
    assert done.exit_code != 0
    assert message in f"{done.output} {done.exception}"
