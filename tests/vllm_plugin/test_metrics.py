"""The door's numbers in the registry that vLLM's own `/metrics` shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY, generate_latest

from semel.engine.vllm.plugins.encoder_metrics import EncoderPage, EncoderTotals
from semel.vllm_plugin import metrics
from semel.vllm_plugin.counters import COUNTS, count
from semel.vllm_plugin.metrics import add_encoder_page, show_metrics

ONE_SERVER = SimpleNamespace(_api_process_count=1)


@pytest.fixture(autouse=True)
def _nothing_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    COUNTS.clear()
    monkeypatch.setattr(metrics, "_PAGES", [])


def shown() -> list[str]:
    return [line for line in generate_latest(REGISTRY).decode().splitlines() if line.startswith("semel_")]


def shown_rows() -> list[int]:
    return [row for page in metrics._PAGES for row in page.read()]


def test_counters_and_the_encoders_totals_are_in_the_registry_of_vllms_server_once() -> None:
    assert shown() == []
    for _ in range(2):
        show_metrics()
    count("repaired")
    count("preprocessed", 3)
    page = EncoderPage.open(add_encoder_page(ONE_SERVER)["metrics"])
    page.write(0, EncoderTotals(queries=7, hits=5))
    add_encoder_page(ONE_SERVER)  # a configuration that no engine was started with
    lines = shown()
    assert 'semel_vllm_plugin_events_total{event="repaired"} 1.0' in lines
    assert 'semel_vllm_plugin_events_total{event="preprocessed"} 3.0' in lines
    assert 'semel_encoder_cache_hits_total{engine="0"} 5.0' in lines
    assert len(lines) == len(set(lines))


def test_the_encoders_totals_leave_no_file() -> None:
    before = set(Path("/dev/shm").iterdir())
    path = add_encoder_page(ONE_SERVER)["metrics"]
    assert path.startswith("/proc/")
    assert not {one for one in Path("/dev/shm").iterdir() if "semel" in one.name} - before


def test_with_several_api_servers_there_are_none_of_the_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert add_encoder_page(SimpleNamespace(_api_process_count=2)) == {}
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "somewhere")
    assert add_encoder_page(ONE_SERVER) == {}


def test_under_ray_there_are_none_of_the_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes the configuration in a task, and starts the engine elsewhere."""
    for is_up, settings in ((False, ["metrics"]), (True, [])):
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda is_up=is_up: is_up))
        assert list(add_encoder_page(ONE_SERVER)) == settings


@pytest.mark.engine
def test_an_engine_whose_page_is_gone_runs_without_one_and_touches_no_other_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from semel.engine.vllm.plugins.encoder_cache import EncoderCache, EncoderCacheConfig

    path = add_encoder_page(ONE_SERVER)["metrics"]
    EncoderCache(8, EncoderCacheConfig(metrics=path))
    assert shown_rows() == [0]  # the control
    caplog.clear()
    with (tmp_path / "theirs").open("w") as file:  # the process id is of another process by now
        EncoderCache(8, EncoderCacheConfig(metrics=f"/proc/self/fd/{file.fileno()}"))
    EncoderCache(8, EncoderCacheConfig(metrics=f"/proc/{2**22 + 1}/fd/3"))
    assert (tmp_path / "theirs").stat().st_size == 0
    assert [text.split(":")[0] for text in caplog.messages] == ["the encoder's metrics are not written"] * 2


def test_nothing_is_in_the_registry_without_semel() -> None:
    """In a process of its own; the control is the same with what a level does."""
    program = (
        "import sys; from prometheus_client import REGISTRY, generate_latest\n"
        "from semel.vllm_plugin import register; register()\n"
        "{}from semel.vllm_plugin import counters; counters.count('x')\n"
        "print('semel_' in generate_latest(REGISTRY).decode())"
    )
    for shows, expected in (("", "False"), ("from semel.vllm_plugin import metrics; metrics.show_metrics()\n", "True")):
        run = [sys.executable, "-c", program.format(shows)]
        env = {name: value for name, value in os.environ.items() if name != "SEMEL"}
        done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=200, check=True)
        assert done.stdout.split() == [expected]
