"""End of an engine's processes with the worker that started them, however that ended.

vLLM's processes wait for their parent for ever if it was killed, by an operator or for want of memory, and keep the
device's memory. Each of them watches the worker itself, not its own parent: an engine core that hangs keeps nobody. The
worker names itself in the environment, which every process below it has from its first instruction. Those that vLLM
spawns import the `semel` command again before all else, so they watch while they import vLLM and load the model.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["OWNER", "end_with_owner", "owning"]

OWNER: Final = "SEMEL_ENGINE_OWNER"
"""The variable with the process id of the worker."""

_THREAD: Final = "semel-owner"


@contextmanager
def owning() -> Iterator[None]:
    """Own the engine processes that are started meanwhile."""
    os.environ[OWNER] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[OWNER]


def end_with_owner() -> None:
    """Let this process be killed when its owner ends, if it has one. May be called again, as after a fork."""
    owner = int(os.environ.get(OWNER, 0))
    if owner in (0, os.getpid()) or any(thread.name == _THREAD for thread in threading.enumerate()):
        return
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        _end()
    except OSError:  # a kernel that has none: it ends as vLLM ends it
        return
    threading.Thread(target=_watch, args=(descriptor,), name=_THREAD, daemon=True).start()


def _watch(descriptor: int) -> None:
    ended = select.poll()
    ended.register(descriptor, select.POLLIN)
    ended.poll()
    _end()


def _end() -> None:
    """End at once: nobody is left who could read an answer, and a step may keep the interpreter from an orderly end."""
    os.kill(os.getpid(), signal.SIGKILL)
