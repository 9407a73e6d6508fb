"""The steps of a vLLM, what keeps it from them on purpose, and the end of one that makes none (threats S22)."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from semel.engine.progress import StepWatch
from semel.engine.vllm.compat.internals import core_pids, watch_calls, watch_steps

__all__ = ["StepCounter", "Suspensions", "kill_processes"]

_COLLECTIVE: Final = "collective_rpc."
_BEGINNINGS: Final = {
    "pause_scheduler": "pause",
    "sleep": "sleep",
    f"{_COLLECTIVE}start_weight_update": "weights",
    f"{_COLLECTIVE}start_draft_weight_update": "weights",
}
_ENDS: Final = {
    "resume_scheduler": ("sleep", "pause", "weights"),  # of an update that failed nobody says the end
    "wake_up": ("sleep", "pause", "weights"),  # vLLM resumes then, whoever has paused
    f"{_COLLECTIVE}finish_weight_update": ("weights",),
}
_LONG: Final = frozenset(("add_lora", "release_kv_cache_memory", "save_sharded_state"))
"""Other calls inside which no step can be. Any other call is short: one that takes long excuses no engine."""

_TRACKER: Final = b"resource_tracker"
"""Python's process that removes the shared memory of those that were killed, and ends by itself."""

logger = logging.getLogger(__name__)


class Suspensions:
    """Reasons for an engine to make no steps: a slow call, a pause, a sleep or an update of weights."""

    def __init__(self, watch: StepWatch) -> None:
        self._watch = watch
        self._states: set[str] = set()

    @contextlib.contextmanager
    def during(self, method: str) -> Iterator[Callable[[Any], None]]:
        """Suspend the clock while a method of the engine core runs, and after it for as long as it says."""
        if not (method in _BEGINNINGS or method in _ENDS or method in _LONG or method.startswith(_COLLECTIVE)):
            yield _ignore
            return
        with self._watch.suspended():
            if (state := _BEGINNINGS.get(method)) is not None and state not in self._states:
                self._states.add(state)
                self._watch.suspend()

            def on_result(result: Any) -> None:
                # Of a sleep that ends in part the engine says False.
                for state in self._states.intersection(() if result is False else _ENDS.get(method, ())):
                    self._states.remove(state)
                    self._watch.resume()

            yield on_result


class StepCounter:
    """A watcher of an `AsyncLLM`'s steps, and of its requests that wait for more."""

    def __init__(self, llm: Any) -> None:
        self.watch = StepWatch()
        self._llm = weakref.ref(llm)
        self._is_complete = watch_steps(llm, self.watch.step, self.review)
        """True if the engine reports all of its steps; otherwise no request is counted, and so nothing is hung."""

        if self._is_complete:
            watch_calls(llm, Suspensions(self.watch).during)

    def review(self) -> None:
        """Count the requests to which the engine owes a step."""
        if self._is_complete and (llm := self._llm()) is not None:
            self.watch.set_requests(llm.get_num_unfinished_requests())


def kill_processes(llm: Any) -> None:
    """End the engine core and all that it has started, also where it is stopped; nothing is awaited."""
    cores = core_pids(llm)
    for pid in [*cores, *_descendants(cores)]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    logger.warning("the engine's processes are killed: %s", ", ".join(map(str, cores)) or "none is on this host")


def _descendants(pids: Iterable[int]) -> list[int]:
    """Return the children of processes and theirs, but for resource trackers."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    with contextlib.suppress(OSError):
        for entry in list(Path("/proc").iterdir()):
            with contextlib.suppress(OSError, ValueError, IndexError):
                pid = int(entry.name)
                if _TRACKER not in (entry / "cmdline").read_bytes():
                    children[int((entry / "stat").read_text().rpartition(")")[2].split()[1])].append(pid)
    found: list[int] = []
    pending = list(pids)
    while pending:
        below = children.pop(pending.pop(), [])
        found += below
        pending += below
    return found


def _ignore(_: Any) -> None:
    """Do nothing with the result of a short call."""
