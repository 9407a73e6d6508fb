"""vLLM's statistics as a worker uses them, with vLLM's own loggers and without an engine."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from semel.engine.vllm.compat.parsers import count_parsed_calls
from semel.telemetry import CacheLookups, Meter
from tests.engine.family_questions import engine_arguments

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

MM_CACHE = r'^vllm:mm_cache_{name}_total{{engine="(\d+)",model_name="([^"]+)"}} (\S+)$'


@pytest.fixture(scope="module")
def config(tiny: Callable[[str], Path]) -> Any:
    arguments = engine_arguments("qwen2-vl", tiny("qwen2-vl"))
    arguments.served_model_name = ["shown", "alias"]
    return arguments.create_engine_config()


@pytest.fixture(autouse=True)
def emptied() -> Iterator[None]:
    """vLLM's metrics are the process's: no other test finds them."""
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    unregister_vllm_metrics()
    yield
    unregister_vllm_metrics()


def managed(config: Any, *, disable_log_stats: bool = False, ranks: list[int] | None = None) -> Any:
    """An `AsyncLLM` with what it makes of its statistics' loggers."""
    from vllm.v1.metrics.loggers import StatLoggerManager

    from semel.engine.vllm.statistics import stat_loggers

    loggers = stat_loggers(SimpleNamespace(disable_log_stats=disable_log_stats))
    if disable_log_stats and not loggers:
        return SimpleNamespace(logger_manager=None)
    manager = StatLoggerManager(config, ranks, loggers, enable_default_loggers=not disable_log_stats)
    manager.log_engine_initialized()
    return SimpleNamespace(logger_manager=manager)


async def exported() -> str:
    from semel.engine.vllm.statistics import export_metrics

    meter, lookups = Meter(), CacheLookups()
    meter.watch(lookups.samples)
    lookups.count("shown", "image", "worker", 1, True)
    export_metrics(meter)
    return (await meter.scrape()).decode()


async def page_of_vllm() -> str:
    """What the metrics router of vLLM's own server shows."""
    from fastapi import FastAPI
    from vllm.entrypoints.serve.instrumentator.metrics import attach_router

    app = FastAPI()
    attach_router(app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://vllm") as client:
        reply = await client.get("/metrics")
    assert reply.status_code == 200
    return reply.text


def names(text: str) -> list[str]:
    return re.findall(r"^# TYPE (vllm:\S+)", text, re.MULTILINE)


async def test_all_that_vllm_registers_is_exported_once_and_with_vllm_s_labels(config: Any) -> None:
    """Control: before vLLM has made its loggers there is nothing."""
    assert names(await exported()) == []
    managed(config)
    count_parsed_calls("shown")
    text = await exported()
    found = names(text)
    assert len(found) == len(set(found))
    assert found == names(await page_of_vllm())
    assert {"vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:tool_call_parser_invocations_total"} < {
        *found
    }
    assert 'vllm:num_requests_running{engine="0",model_name="shown"} 0.0' in text
    assert 'semel_mm_cache_queries_total{modality="image",model="shown",tier="worker"} 1.0' in text


@pytest.mark.parametrize("ranks", [None, [3]])
async def test_items_are_counted_in_vllm_s_own_counters_and_in_its_line_of_the_log_D8(
    config: Any, ranks: list[int] | None, caplog: pytest.LogCaptureFixture
) -> None:
    from semel.engine.vllm.statistics import count_items

    llm = managed(config, ranks=ranks)
    for queries, hits in ((3, 1), (0, 0), (1, 1)):
        count_items(llm, queries, hits)
    text = await exported()
    for name, count in (("queries", 4.0), ("hits", 2.0)):
        ((engine, model, value),) = re.findall(MM_CACHE.format(name=name), text, re.MULTILINE)
        assert (engine, model, float(value)) == (str(ranks[0] if ranks else 0), "shown", count)
    logging.getLogger("vllm").addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.DEBUG, "vllm"):
            llm.logger_manager.log()
    finally:
        logging.getLogger("vllm").removeHandler(caplog.handler)
    assert "MM cache hit rate: 50.0%" in caplog.text


async def test_without_statistics_nothing_is_exported_but_the_engine_core_has_someone_to_report_to(config: Any) -> None:
    """vLLM's engine core reports its steps as soon as there is a logger. Control: with statistics there are names."""
    from semel.engine.vllm.statistics import NoStatistics, count_items

    llm = managed(config, disable_log_stats=True)
    assert [type(one) for one in llm.logger_manager.stat_loggers] == [NoStatistics]
    count_items(llm, 3, 1)
    llm.logger_manager.record(None, None)
    llm.logger_manager.record_sleep_state(1, 1)
    llm.logger_manager.record_admission_rejection("max_num_queued_reqs")
    llm.logger_manager.log()
    assert names(await exported()) == []
    managed(config)
    assert len(names(await exported())) > 50
