"""The alert rules: real promtool checks them, each fires when it should and stays silent when it should not."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from semel.telemetry import METRICS
from tests.telemetry.prometheus import ALERTS, find

RULES: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
PAGE = ALERTS.parents[1] / "operate" / "metrics.md"
MINUTES = 30
UP = 'up{job="semel", instance="f"}'
FIRST_TOKEN = "semel_stage_seconds_bucket{{stage='first_token', instance='f', le='{}'}}"
LAG = "semel_event_loop_lag_seconds_bucket{{instance='f', le='{}'}}"
REQUESTS = "semel_requests_total{{instance='f', route='r', status='{}'}}"


@dataclass(frozen=True)
class Case:
    """Series in promtool's notation, a value a minute: with which an alert fires, and with which it does not."""

    fires: Mapping[str, str]
    silent: Mapping[str, str]


def gauge(name: str, high: float, low: float, **labels: str) -> Case:
    series = name + "{" + ", ".join(f'{key}="{value}"' for key, value in {"instance": "f", **labels}.items()) + "}"
    return Case({series: f"{high}x{MINUTES}"}, {series: f"{low}x{MINUTES}"})


def counter(name: str, fast: float, slow: float, **labels: str) -> Case:
    (series,) = gauge(name, 0, 0, **labels).fires
    return Case({series: f"0+{fast}x{MINUTES}"}, {series: f"0+{slow}x{MINUTES}"})


def share(status: str, high: int, low: int) -> Case:
    bad, good = REQUESTS.format(status), REQUESTS.format(200)
    return Case(
        {bad: f"0+{high}x{MINUTES}", good: f"0+{1000 - high}x{MINUTES}"},
        {bad: f"0+{low}x{MINUTES}", good: f"0+{1000 - low}x{MINUTES}"},
    )


def histogram(series: str, below: str, above: str) -> Case:
    """All observations over the limit, and all under it."""
    slow = {series.format(below): f"0x{MINUTES}", series.format(above): f"0+60x{MINUTES}"}
    fast = {series.format(below): f"0+60x{MINUTES}", series.format(above): f"0+60x{MINUTES}"}
    return Case(slow | {series.format("+Inf"): f"0+60x{MINUTES}"}, fast | {series.format("+Inf"): f"0+60x{MINUTES}"})


def together(*cases: Case) -> Case:
    fires = {series: values for case in cases for series, values in case.fires.items()}
    return Case(fires, {series: values for case in cases for series, values in case.silent.items()})


CASES: Mapping[str, Case] = {
    "SemelProcessDown": Case({UP: f"0x{MINUTES}"}, {UP: f"1x{MINUTES}"}),
    "SemelNoWorker": together(
        gauge("semel_worker_connected", 0, 0, worker="a"), gauge("semel_worker_connected", 0, 1, worker="b")
    ),
    "SemelWorkerDisconnected": gauge("semel_worker_connected", 0, 1, worker="a"),
    "SemelWorkerRefused": gauge("semel_worker_refused", 1, 0, worker="a", reason="probes"),
    "SemelWorkerEjected": gauge("semel_worker_ejected", 1, 0, worker="a"),
    "SemelEnginesLost": counter("semel_engines_lost_total", 1, 0.1, code="gone"),
    "SemelErrors": share("500", 50, 10),
    "SemelRefusals": share("503", 200, 50),
    "SemelSlowFirstToken": histogram(FIRST_TOKEN, "10", "30"),
    "SemelEventLoopLate": histogram(LAG, "0.05", "0.1"),
    "SemelPoolFull": together(gauge("semel_pool_waiting", 20, 10), gauge("semel_pool_processes", 2, 2)),
    "SemelPoolProcessesDie": counter("semel_pool_replaced_total", 1, 0.1),
    "SemelMediaMemoryFull": together(
        gauge("semel_media_in_flight_bytes", 95, 80), gauge("semel_media_in_flight_limit_bytes", 100, 100)
    ),
    "SemelConnectionsRefused": counter("semel_connections_closed_total", 120, 6, reason="full"),
    "SemelFileStale": gauge("semel_file_stale", 1, 0),
    "SemelEngineStands": gauge("semel_engine_waited_seconds", 90, 5),
    "SemelEngineQueueLong": together(
        gauge("semel_engine_waiting_requests", 80, 40), gauge("vllm:num_requests_waiting", 80, 40)
    ),
    "SemelKvCacheFull": gauge("vllm:kv_cache_usage_perc", 0.99, 0.6),
    "SemelEncoderRejects": counter("semel_encoder_rejected_total", 0.5, 0, engine="0"),
    "SemelMediaStoreErrors": counter("semel_media_store_errors_total", 2, 0.1),
}


def outcome(name: str, series: Mapping[str, str], *, fires: bool) -> dict[str, Any]:
    """One test of promtool: the alert is firing after half an hour, or it is not."""
    query = f'count(ALERTS{{alertname="{name}", alertstate="firing"}})'
    samples = [{"labels": "{}", "value": 1}] if fires else []
    return {
        "interval": "1m",
        "name": f"{name} {'fires' if fires else 'is silent'}",
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        "promql_expr_test": [{"expr": query, "eval_time": f"{MINUTES}m", "exp_samples": samples}],
    }


def promtool(home: Path, rules: Path, tests: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    file = home / "tests.json"
    file.write_text(json.dumps({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}))
    command = [find("promtool"), "test", "rules", str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_every_rule_has_a_case_a_plain_summary_a_severity_and_a_line_in_the_runbook() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(names) == len(set(names)) >= 15
    assert CASES.keys() == set(names)
    page = PAGE.read_text()
    for rule in RULES:
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert f"| `{rule['alert']}` |" in page


def test_every_rule_asks_for_metrics_that_there_are() -> None:
    """Control: a misspelt name is found."""
    known = {metric.name for metric in METRICS}

    def unknown(expression: str) -> set[str]:
        return {name.removesuffix("_bucket") for name in re.findall(r"semel_\w+", expression)} - known

    assert not set().union(*(unknown(rule["expr"]) for rule in RULES))
    assert unknown("semel_pool_waitin > 1") == {"semel_pool_waitin"}


@pytest.mark.slow
def test_each_alert_fires_and_is_silent(tmp_path: Path) -> None:
    tests = [outcome(name, case.fires, fires=True) for name, case in CASES.items()]
    tests += [outcome(name, case.silent, fires=False) for name, case in CASES.items()]
    checked = subprocess.run(
        [find("promtool"), "check", "rules", str(ALERTS)], capture_output=True, timeout=60, check=False
    )
    assert checked.returncode == 0, checked.stderr
    done = promtool(tmp_path, ALERTS, tests)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["SemelNoWorker", "SemelPoolFull", "SemelErrors"])
def test_mutant_a_rule_that_is_turned_round_is_found(name: str, tmp_path: Path) -> None:
    rules = yaml.safe_load(ALERTS.read_text())
    (rule,) = [rule for rule in rules["groups"][0]["rules"] if rule["alert"] == name]
    rule["expr"] = rule["expr"].replace("== 0", "== 1") if "== 0" in rule["expr"] else rule["expr"].replace(">", "<")
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    case = CASES[name]
    tests = [outcome(name, case.fires, fires=True), outcome(name, case.silent, fires=False)]
    assert promtool(tmp_path, tmp_path / "rules.json", tests).returncode == 1
