"""How a program of the pool is started: which interpreter, which descriptors, which environment."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from semel.processing.pool.environment import child_environment
from semel.telemetry.logs import is_json

__all__ = ["CANNOT_FORK", "log_words", "start"]

CANNOT_FORK: Final = 3
"""The exit status of a fork server that cannot fork, and would not the next time either."""

_SET_DEATH_SIGNAL: Final = 1
_COMMAND: Final = (sys.executable, "-P", "-m")


async def start(module: str, descriptors: Sequence[int], words: Sequence[str]) -> Process:
    """Start a module as a program. Its arguments are the descriptors, which it has open, and then the words."""
    return await asyncio.create_subprocess_exec(
        *_COMMAND,
        module,
        *map(str, descriptors),
        *words,
        stdin=DEVNULL,
        stdout=DEVNULL,
        env=child_environment(os.environ),
        pass_fds=descriptors,
        preexec_fn=partial(_begin, ctypes.CDLL(None).prctl, os.getpid()),
    )


def _begin(prctl: Any, parent: int) -> None:
    """Lead a group, as Ctrl-C is for the pool, and end with the pool: a program that still imports reads no pipe."""
    os.setpgrp()
    prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def log_words() -> tuple[str, ...]:
    """The words that have a program log as we do."""
    return ("json",) if is_json() else ()
