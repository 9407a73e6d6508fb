"""Exit of a process without taking its interpreter apart.

With torch and vLLM loaded that takes seconds for each process of an engine, one after the other, and gives back nothing
that the kernel does not take back by itself. Everything that asked to run at an exit still runs, and all that was
printed is flushed. With plain vLLM a process may be a fork of the user's own, whose exit functions are not to run here.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from typing import Final, NoReturn

from semel.engine.owner import OWNER

__all__ = ["exit_quickly", "exit_quickly_when_done"]

_AFTER_ALL_OTHERS: Final = -1_000


def exit_quickly(code: int) -> NoReturn:
    """End this process now, after what is registered with `atexit`."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def exit_quickly_when_done() -> None:
    """Let a process that a worker's engine has started end so when its work is done. One that fails ends as always."""
    if parent_process() is not None and OWNER in os.environ:
        Finalize(None, _end, exitpriority=_AFTER_ALL_OTHERS)


def _end() -> None:
    error = sys.exc_info()[1]  # the work may end by one: this is called on its way out
    if error is None:
        exit_quickly(0)
    if isinstance(error, SystemExit) and error.code in (None, 0):
        exit_quickly(0)
