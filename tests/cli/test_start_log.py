"""What a start prints: its stages, and the cause of a failure, which is not what comes last."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from semel.cli.start_log import FIRST_STAGE, Progress, StartLog
from semel.compose import run_worker
from semel.core.flag import fill
from semel.settings.secrets import create_key
from semel.settings.worker import WorkerSettings

FAILED = """\
INFO 2026-11-16 22:15:53,956 uvicorn.error: Started server process [7488]
(EngineCore pid=11491) INFO 11-16 22:17:02 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m'
(Worker pid=11803) ERROR 11-16 22:17:15 [multiproc_executor.py:700] WorkerProc failed to start.
(Worker pid=11803) ERROR 11-16 22:17:15 [multiproc_executor.py:700] Traceback (most recent call last):
(EngineCore pid=11491) INFO 11-16 22:17:15 [core.py:1] ValueError: a line of another process
(Worker pid=11803) ERROR 11-16 22:17:15 [multiproc_executor.py:700]   File "cpu_worker.py", line 82, in __init__
(Worker pid=11803) ERROR 11-16 22:17:15 [multiproc_executor.py:700]     raise ValueError(
(Worker pid=11803) ERROR 11-16 22:17:15 [multiproc_executor.py:700] ValueError: Available memory on node 0 is less
(EngineCore pid=11491) ERROR 11-16 22:17:16 [core.py:1100] Traceback (most recent call last):
(EngineCore pid=11491) ERROR 11-16 22:17:16 [core.py:1100]   File "core.py", line 1, in run
(EngineCore pid=11491) ERROR 11-16 22:17:16 [core.py:1100] Exception: WorkerProc initialization failed
Traceback (most recent call last):
  File "app.py", line 1, in worker
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
CAUSE = "ValueError: Available memory on node 0 is less"


def read(text: str) -> StartLog:
    log = StartLog()
    for start in range(0, len(text), 37):  # in pieces, as a pipe gives them
        log.feed(text[start : start + 37].encode())
    return log


def test_the_cause_is_the_first_exception_of_the_process_that_failed_first() -> None:
    assert read(FAILED).cause == CAUSE


def test_the_cause_is_found_in_json_lines() -> None:
    exception = 'Traceback (most recent call last):\n  File "x.py", line 1\nOSError: no such device'
    lines = [{"message": "starting", "level": "INFO"}, {"message": "failed", "level": "ERROR", "exception": exception}]
    assert read("".join(json.dumps(line) + "\n" for line in lines)).cause == "OSError: no such device"
    refused = {"message": "vLLM refuses it", "level": "ERROR", "logger": "semel"}
    assert read(json.dumps(refused) + "\n").cause == "vLLM refuses it"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("semel: vLLM refuses its configuration: too long\n", "vLLM refuses its configuration: too long"),
        (f"{FAILED}semel: the key file is gone\n", "the key file is gone"),
        ("Traceback (most recent call last):\n  File\nKeyboardInterrupt\nKilled\n", "Killed"),
        ("ERROR 11-16 22:17:15 [x.py:1] no space left\nbye\n", "no space left"),
        ("Segmentation fault\n", "Segmentation fault"),
        ("", ""),
    ],
)
def test_without_an_exception_what_comes_nearest_is_the_cause(text: str, cause: str) -> None:
    assert read(text).cause == cause


def test_the_stage_follows_what_vllm_says() -> None:
    log, stages = StartLog(), [FIRST_STAGE]
    for line in (
        "(MainProcess pid=7486) INFO 11-16 22:16:49 [model.py:733] Resolved architecture: Qwen2VL",
        "(EngineCore pid=1) INFO 11-16 22:17:02 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: x",
        "(Worker pid=2) INFO 11-16 22:17:15 [cpu_model_runner.py:68] Starting to load model /tmp/tiny...",
        "Loading safetensors checkpoint shards:  18% Completed | 3/17 [00:00<?, ?it/s]",
        "(EngineCore pid=1) INFO 11-16 22:17:17 [kv_cache_utils.py:2327] CPU KV cache size: 1,048,576 tokens, Maximum",
        "INFO 2026-11-16 22:17:22,610 semel.compose.worker: the worker for m listens at ipc:///w",
    ):
        log.feed(line.encode() + b"\r\n")
        stages.append(log.stage)
    assert stages[1:] == [
        "configuring the engine for Qwen2VL",
        "starting the engine's processes",
        "loading weights",
        "loading weights: file 3 of 17",
        "warming up, with a KV cache of 1,048,576 tokens",
        "loading the model's processor",
    ]


def test_a_stage_is_shown_with_its_seconds_and_told_when_it_is_done(caplog: pytest.LogCaptureFixture) -> None:
    now, shown = [0.0], list[str]()
    progress = Progress(shown.append, clock=lambda: now[0])
    with caplog.at_level("INFO", logger="semel.cli.serve"):
        for seconds, stage in (
            (0, FIRST_STAGE),
            (12, "loading weights: file 1 of 2"),
            (15, "loading weights: file 2 of 2"),
        ):
            now[0] = seconds
            progress.show(stage, "no worker is connected")
        now[0] = 20
        progress.show("loading the model's processor", "the model's processor is being warmed up")
    assert shown[1] == "loading weights: file 1 of 2 · 12 s"
    assert shown[-1] == "loading the model's processor (the model's processor is being warmed up) · 20 s"
    assert caplog.messages == [f"{FIRST_STAGE} took 12.0 s", "loading weights took 8.0 s"]


async def test_a_worker_says_that_it_imports_vllm_before_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The import takes up to half a minute, without a word of vLLM's."""
    create_key(tmp_path / "key")
    values = {"model": "m", "listen": f"ipc://{tmp_path}/w", "fleet_key_file": tmp_path / "key"}
    monkeypatch.setitem(sys.modules, "semel.engine.vllm.arguments", None)
    caplog.set_level("INFO")
    with pytest.raises(ImportError):
        await run_worker(fill(WorkerSettings, values), ())
    assert caplog.messages == [FIRST_STAGE]
