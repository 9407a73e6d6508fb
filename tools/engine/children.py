"""A module of the tests in a process of its own, with a deadline: after an error of a model, an engine may hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["ROOT", "NoResult", "json_of"]

ROOT: Final = Path(__file__).resolve().parent.parent.parent


class NoResult(Exception):
    """The process wrote no result; the words say why."""


def json_of(
    module: str,
    arguments: Sequence[str],
    *,
    log: Path,
    deadline_s: float,
    environment: Mapping[str, str] | None = None,
) -> str:
    """The last line of JSON that a module writes; its errors go to the log."""
    variables = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"} | dict(environment or {})
    variables.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=variables,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            process_group=0,
        ) as process,
    ):
        try:
            output, _ = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            raise NoResult(f"no answers within {deadline_s:.0f} s") from None
        finally:
            # The engine's own processes are of its group; one that hangs must not outlive it.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            return line
    lines = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line]
    raise NoResult(f"no answers: {lines[0][-200:] if lines else f'exit code {process.returncode}'}")
