"""`--cell`: the name of a process's cell, where operators look for it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from semel.cells.settings import CellSettings
from semel.cli.log_relay import json_line
from semel.core import Contract, Target
from semel.errors import ConfigError
from semel.fleet.compatibility import contract_id
from semel.telemetry.logs import JsonLines
from semel.telemetry.otlp import OtlpTracing

CONTRACT = Contract("m", "f" * 64, Target("float32"), {}, {"image": 1}, 16, 32, 64)


@pytest.mark.parametrize("name", ["", "A", "a b", "-a", "x" * 33, 'a"', "a\n"])
def test_a_name_that_does_not_fit_everywhere_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no name of a cell"):
        _ = CellSettings(name).name


def test_lines_in_json_name_it() -> None:
    record = logging.LogRecord("semel", logging.INFO, "", 0, "hello", (), None)
    assert json.loads(JsonLines("eu-1").format(record))["cell"] == "eu-1"
    assert "cell" not in json.loads(JsonLines().format(record))
    assert json.loads(json_line(b"printed", "eu-1"))["cell"] == "eu-1"
    assert "cell" not in json.loads(json_line(b"printed"))


async def test_spans_name_it() -> None:
    for cell in ("eu-1", None):
        tracing = OtlpTracing.sending(InMemorySpanExporter(), "semel-frontend", cell=cell)
        assert tracing._provider.resource.attributes.get("semel.cell") == cell
        await tracing.close()


def test_the_hash_of_a_contract_is_of_what_answers_depend_on() -> None:
    assert contract_id(CONTRACT) == contract_id(replace(CONTRACT, cache_bytes=1))
    others = (replace(CONTRACT, model="n"), replace(CONTRACT, max_tokens=33))
    assert len({contract_id(CONTRACT), *map(contract_id, others)}) == 3
