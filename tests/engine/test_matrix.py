"""vLLM's configurations: what the comparison finds, and those of CI on engines (the others: `scripts/matrix`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from semel.errors import ConfigError
from tools.engine.matrix import IN_CI, MATRIX, REFUSED, Refused, flags_of
from tools.engine.matrix_parity import compare_sides, run_configuration
from tools.engine.matrix_side import Side
from tools.engine.sixteen import SIXTEEN, ProbeAnswer

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
