"""The dashboard in the repository is the one in the code, and asks for metrics that there are."""

from __future__ import annotations

import re
from pathlib import Path

from semel.telemetry import METRICS
from tools.dashboard import PANELS, dashboard

FILE = Path(__file__).parents[2] / "docs/grafana/semel.json"


def test_the_file_is_what_the_code_makes() -> None:
    """To make it anew: `python -m tools.dashboard > docs/grafana/semel.json`."""
    assert FILE.read_text() == dashboard()


def test_every_query_names_a_metric_and_only_its_labels() -> None:
    known = {metric.name: metric for metric in METRICS}
    for panel in PANELS:
        for legend, query in panel.queries.items():
            names = {name.removesuffix("_bucket") for name in re.findall(r"semel_\w+", query)}
            assert names, panel.title
            assert names <= known.keys(), panel.title
            labels = {"le", "instance"}.union(*(known[name].labels for name in names))
            asked = set(re.findall(r"{{(\w+)}}", legend))
            asked |= {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
            assert asked <= labels, panel.title
