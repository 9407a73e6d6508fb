"""The logs of the engine's processes, which are vLLM's and not ours."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from semel.engine.vllm.compat.internals import LOGGING_CONFIG
from semel.settings.environment import default_variable
from semel.telemetry.logs import JSON_LOGGING, LogFormat

__all__ = ["engine_logs"]


@contextmanager
def engine_logs(form: LogFormat) -> Iterator[None]:
    """Let vLLM log as we do, unless it is told otherwise; to be entered before it is imported."""
    if form == "text":
        yield
        return
    with tempfile.NamedTemporaryFile("w", prefix="semel-", suffix=".json") as file:
        json.dump(JSON_LOGGING, file)
        file.flush()
        with default_variable(LOGGING_CONFIG, file.name):
            yield
