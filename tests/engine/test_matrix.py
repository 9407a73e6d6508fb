"""vLLM's configurations: what the comparison finds, and those of CI on engines (the others: `scripts/matrix`)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from semel.errors import ConfigError
from tests.engine.children import ROOT, NoResult, json_of
from tests.engine.matrix import IN_CI, MATRIX, REFUSED, SHIMS, Refused, flags_of
from tests.engine.matrix_parity import MatrixResult, compare_sides, run_configuration
from tests.engine.matrix_requests import CONTROLS, random_requests
from tests.engine.matrix_side import Side
from tests.engine.sixteen import SIXTEEN, ProbeAnswer
from tools.engine.matrix_page import HEAD, replace_results, row_of

ONE = replace(MATRIX["plain"], has_lies=True, preempts=True)
FIRST = SIXTEEN[0].name


def answers(names: list[str]) -> dict[str, ProbeAnswer]:
    return {name: ProbeAnswer((number, 7), (-0.5, -0.25)) for number, name in enumerate(names)}


def side(**change: Any) -> Side:
    """One that has seen everything, and answers as any other."""
    whole = Side(
        probes=answers([probe.name for probe in SIXTEEN]),
        random=answers([f"random {number}" for number in range(9)]),
        controls=answers(["swapped", "late"]),
        planted={"swapped": ProbeAnswer((9,)), "late": ProbeAnswer(fault="FeatureRejected")},
        lies={"less room": "ended alone"},
        facts=dict(ONE.facts),
        aborted=2,
        preemptions=2,
        evictions=3,
        item_evictions=4,
        left_out_bytes=5_000_000,
    )
    return replace(whole, **change)


def test_two_sides_that_answer_alike_are_right() -> None:
    result = compare_sides(ONE, side(), side())
    assert result.faults == []
    assert (result.equal_probes, result.equal_random, result.caught) == (16, 9, {"swapped": True, "late": True})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"probes": {**side().probes, FIRST: ProbeAnswer((1, 7), (-0.5, -0.25))}}, f"{FIRST}: tokens"),
        ({"probes": {**side().probes, FIRST: ProbeAnswer((0, 7), (-0.5, -0.26))}}, f"{FIRST}: log probabilities"),
        ({"random": {**side().random, "random 3": ProbeAnswer(fault="EngineDead")}}, "random 3: answered / EngineDead"),
        ({"random": {}}, "random 0: answered / not asked"),
        ({"controls": {**side().controls, "late": ProbeAnswer((8, 8))}}, "late: tokens"),
        (
            {"planted": {**side().planted, "swapped": side().controls["swapped"]}},
            "planted fault was not found: swapped",
        ),
        ({"lies": {"less room": "answered"}}, "a feature that lies was not ended alone"),
        ({"lies": {}}, "a feature that lies was not ended alone"),
        ({"evictions": 0}, "nothing was evicted"),
        ({"preemptions": 0}, "nobody was preempted"),
        ({"item_evictions": 0}, "no item was evicted"),
        ({"aborted": 1}, "hardly a request was aborted"),
        ({"left_out_bytes": 0}, "lazy transfer should be on"),
        ({"facts": {**ONE.facts, "use_v2_model_runner": True}}, "semel ran with use_v2_model_runner = True"),
    ],
)
def test_what_differs_or_was_not_seen_is_a_fault(change: dict[str, Any], words: str) -> None:
    assert [fault for fault in compare_sides(ONE, side(), side(**change)).faults if words in fault]


def test_faults_on_both_sides_and_lazy_transfer_where_it_should_be_off_are_faults_too() -> None:
    dead = side(probes={**side().probes, FIRST: ProbeAnswer(fault="EngineDead")})
    assert compare_sides(ONE, dead, dead).equal_probes == 15
    assert "should be off" in compare_sides(replace(ONE, ships=False), side(), side()).faults[0]
    alike = side(random=dict.fromkeys(side().random, ProbeAnswer((1,))))
    assert "answers of their own" in compare_sides(ONE, alike, alike).faults[0]


def test_a_page_gets_the_rows_that_were_run_and_keeps_the_others_in_the_order_of_the_matrix() -> None:
    result = compare_sides(ONE, side(), side())
    rows = {name: row_of(MATRIX[name], replace(result, name=name)) for name in ("tp2", "plain")}
    page = "# Title\n<!-- begin matrix -->\n<!-- end matrix -->\nbehind\n"
    page = replace_results(page, {"tp2": rows["tp2"]})
    page = replace_results(page, {"plain": rows["plain"]})
    lines = page.splitlines()
    assert lines == [
        "# Title", "<!-- begin matrix -->", *HEAD, rows["plain"], rows["tp2"], "<!-- end matrix -->", "behind",
    ]  # fmt: skip
    assert "16 of 16 | 9 of 9 (2) |" in rows["tp2"]
    assert rows["tp2"].count("|") == HEAD[0].count("|")
    failed = row_of(MATRIX["tp2"], MatrixResult("tp2", faults=["bare: no answers"]))
    assert failed.count("|") == HEAD[0].count("|")
    assert "bare: no answers" in failed


def test_random_requests_repeat_pictures_abort_some_and_are_the_same_each_time() -> None:
    requests = random_requests(100)
    assert [asdict(request) for request in requests] == [asdict(request) for request in random_requests(100)]
    assert [request.name for request in requests[:30]] == [request.name for request in random_requests(30)]
    for some in (requests, requests[:20]):
        assert 0.1 * len(some) <= sum(request.is_aborted for request in some) <= 0.2 * len(some)
        assert sum(request.answers > 1 for request in some) >= 0.1 * len(some)
    assert {request.priority for request in requests} == {0, 1, 2, 3}
    assert CONTROLS.keys() == {plant for one in MATRIX.values() for plant in one.plants}


def test_a_shim_changes_a_module_when_it_is_imported_and_only_if_it_is_chosen(tmp_path: Path) -> None:
    """In another process, with a module in the place of vLLM's."""
    folder = tmp_path / "vllm" / "platforms"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").touch()
    (folder / "cpu.py").write_text(
        "class CpuPlatform:\n"
        "    @classmethod\n"
        "    def check_and_update_config(cls, config):\n"
        "        config.scheduler_config.async_scheduling = False\n"
    )
    program = (
        "from types import SimpleNamespace as N\n"
        "from vllm.platforms.cpu import CpuPlatform\n"
        "config = N(scheduler_config=N(async_scheduling=True))\n"
        "CpuPlatform.check_and_update_config(config)\n"
        "print(config.scheduler_config.async_scheduling)\n"
    )
    for chosen, printed in (({"SEMEL_SHIM_ASYNC": "1"}, "True"), ({}, "False")):
        environment = {**os.environ, "PYTHONPATH": f"{SHIMS}{os.pathsep}{tmp_path}", **chosen}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=60
        )
        assert done.stdout.strip() == printed


def test_shims_are_no_part_of_what_is_shipped() -> None:
    sources = (ROOT / "src").rglob("*.py")
    assert [path for path in sources if "SEMEL_SHIM" in path.read_text()] == []


def test_a_process_that_writes_no_result_is_told_with_its_error(tmp_path: Path) -> None:
    with pytest.raises(NoResult, match="no answers"):
        json_of("tests.engine.no_such_module", [], log=tmp_path / "log", deadline_s=60)
    with pytest.raises(NoResult, match="within 0 s"):
        json_of("tests.engine.no_such_module", [], log=tmp_path / "log", deadline_s=0)


@pytest.mark.engine
@pytest.mark.parametrize("name", MATRIX)
def test_vllm_knows_the_flags_of_a_configuration(name: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    from semel.engine.vllm.arguments import parse_engine_flags

    one = MATRIX[name]
    for is_semel in (False, True):
        flags = flags_of(one, tmp_path, is_semel=is_semel)
        parse_engine_flags(str(tiny(one.model)), flags, encoder_planning=is_semel and one.encoder_planning)


@pytest.mark.engine
@pytest.mark.parametrize("refused", REFUSED, ids=[one.name for one in REFUSED])
def test_what_semel_cannot_serve_is_refused_before_the_engine_loads(
    refused: Refused, tiny: Callable[[str], Path]
) -> None:
    from semel.engine.vllm.arguments import parse_engine_flags

    with pytest.raises(ConfigError, match=refused.reason):
        parse_engine_flags(str(tiny("qwen2-vl")), refused.flags)


@pytest.mark.engine
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("name", IN_CI)
def test_semel_answers_as_bare_vllm_under_the_same_flags_and_planted_faults_are_found(
    name: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    one = MATRIX[name]
    result = run_configuration(one, tiny(one.model), tmp_path, 20)
    assert result.faults == []
