"""Counts the engines that start: a plug-in that vLLM loads in every process of its own, whoever started it.

vLLM finds it by the folder beside this file, if this folder is on `PYTHONPATH`. For every engine core that a process
starts, a line goes into the file that `SEMEL_ENGINE_STARTS` names: so engines in the test's own process are counted as
those of `semel serve`, of bare vLLM's server, and those that a supervisor starts again.
"""

from __future__ import annotations

import os
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

__all__ = ["ENGINE_STARTS", "count_starts"]

ENGINE_STARTS = "SEMEL_ENGINE_STARTS"
_ENGINE_CORE = "EngineCore"
"""What vLLM calls the processes of its engine cores."""


def count_starts() -> None:
    """From now on, write a line before an engine core starts; nothing without the variable."""
    path = os.environ.get(ENGINE_STARTS)
    if not path:
        return
    start = BaseProcess.start

    def counted(self: BaseProcess) -> None:
        if self.name.startswith(_ENGINE_CORE):
            with Path(path).open("a") as file:
                file.write(f"{os.environ.get('PYTEST_CURRENT_TEST', ' '.join(sys.argv))}\n")
        start(self)

    BaseProcess.start = counted  # type: ignore[method-assign]
