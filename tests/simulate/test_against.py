"""A simulated run next to a measured one of the same requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from semel.errors import ConfigError
from semel.lab.simulate.check import compare, fit, predict, read_run
from tools.simulate.real_sockets import COSTS, measure, recorded


def test_a_run_is_within_the_limits_of_itself_and_a_wrong_one_is_not(tmp_path: Path) -> None:
    asked = recorded(1, requests=60)
    simulated = predict(asked, COSTS)
    path = tmp_path / "run.json"
    path.write_bytes(msgspec.json.encode(structs.replace(asked, measured=simulated)))
    run = read_run(path)
    assert all(one.is_within and one.difference == 0 for one in compare(run, simulated))
    judged = {one.name for one in compare(run, simulated) if one.limit is not None}
    assert judged == {"encodes", "encoder_hits", "preprocessed", "features_sent", "feature_bytes", "p50_s", "p95_s"}

    wrong = {name: value * 1.11 for name, value in simulated.items()}
    assert {one.name for one in compare(run, wrong) if not one.is_within} == judged - {"p95_s"}
    real = structs.replace(run, engines="real")
    assert "p50_s" not in {one.name for one in compare(real, wrong) if not one.is_within}


def test_what_code_takes_is_fitted_to_the_median() -> None:
    asked = recorded(2, requests=60)
    slower = replace(COSTS, step_base_s=COSTS.step_base_s * 1.2)
    run = structs.replace(asked, measured=predict(asked, slower))
    assert fit(run, COSTS).step_base_s == pytest.approx(slower.step_base_s, rel=0.02)


def test_a_file_that_is_no_recorded_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    for text in ("", "{}", '{"frontends": "two"}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="scripts/load --compare --record"):
            read_run(path)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.nightly
def test_modelled_engines_over_real_sockets_are_met_with_costs_fitted_on_another_seed() -> None:
    costs = fit(measure(recorded(40)), COSTS)
    measured = measure(recorded(41))
    assert [one for one in compare(measured, predict(measured, costs)) if not one.is_within] == []
