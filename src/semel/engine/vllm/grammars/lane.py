"""A thread in which grammars are followed, with a deadline in CPU time for each call (threats S27). Knows no vLLM.

One call of xgrammar has no bound of its own: with a token of 48 equal characters in the vocabulary the first mask of a
small regular expression took over 20 s. It lets go of the interpreter meanwhile, so all following runs in one thread,
and the caller watches that thread's CPU clock. Over the deadline the caller goes on without it: a thread cannot be
ended, so it is left to return by itself, at the lowest priority, and touches nothing afterwards. Another one takes its
place. The deadline is CPU time: on a busy machine a call may take long, and nobody is at fault.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Hashable
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

__all__ = ["Lane", "Overdue"]

_SLICE_S: Final = 0.02
_MAX_IDLE_SLICES: Final = 250
"""After so many looks at a call that used no CPU time it waits for something that an abandoned thread holds."""

_LOWEST_PRIORITY: Final = 19

_T = TypeVar("_T")


class Overdue(Exception):
    """A call took more CPU time than it may; its thread was abandoned."""

    def __init__(self, owner: Any) -> None:
        super().__init__("a call took more CPU time than it may")
        self.owner = owner


class _Abandoned(BaseException):
    """The exception that unwinds a thread that nobody waits for any more."""


class _Thread(threading.Thread):
    """A thread that runs one piece of work after the other."""

    def __init__(self) -> None:
        super().__init__(name="grammars", daemon=True)
        self.work: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self.results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self.lock = threading.Lock()
        self.call: tuple[Any, int] | None = None
        """Whose call is under way, and this thread's CPU time when it began, in nanoseconds."""

        self.is_abandoned = False

    def run(self) -> None:
        """Work until it is abandoned."""
        while not self.is_abandoned:
            work = self.work.get()
            try:
                self.results.put((work(), None))
            except _Abandoned:
                return
            except BaseException as error:  # noqa: BLE001 - it is raised where the work was ordered
                self.results.put((None, error))

    def cpu_ns(self) -> int:
        """Return its CPU time; it must be alive."""
        assert self.ident is not None
        return time.clock_gettime_ns(time.pthread_getcpuclockid(self.ident))


class Lane:
    """The thread in which grammars are followed, and those that were abandoned. One thread uses a lane."""

    def __init__(self, max_call_s: float) -> None:
        self._max_call_ns = int(max_call_s * 1e9)
        self._thread: _Thread | None = None
        self._lost: list[tuple[Hashable, _Thread]] = []

    def run(self, work: Callable[[], _T]) -> _T:
        """Run something in the thread; raises `Overdue` if a `call` in it takes too much CPU time."""
        if self._thread is None:
            self._thread = _Thread()
            self._thread.start()
        thread, idle, cpu_ns = self._thread, 0, -1
        thread.work.put(work)
        while True:
            try:
                result, error = thread.results.get(timeout=_SLICE_S)
            except Empty:
                before, cpu_ns = cpu_ns, thread.cpu_ns()
                idle = idle + 1 if cpu_ns == before else 0
                self._check(thread, cpu_ns, is_stuck=idle >= _MAX_IDLE_SLICES)
                continue
            if error is not None:
                raise error
            return result  # type: ignore[no-any-return]

    def call(self, owner: Any, function: Callable[..., _T], *arguments: Any) -> tuple[_T, int]:
        """Call a function for its owner, in the thread: its result, and the CPU time that it took in nanoseconds."""
        thread = threading.current_thread()
        assert isinstance(thread, _Thread)
        began_ns = time.thread_time_ns()
        _begin(thread, (owner, began_ns))
        try:
            result = function(*arguments)
        finally:
            _begin(thread, None)
        return result, time.thread_time_ns() - began_ns

    @property
    def is_inside(self) -> bool:
        """True if this is the thread."""
        return isinstance(threading.current_thread(), _Thread)

    def abandoned(self, group: Hashable | None = None) -> int:
        """Count the threads that were abandoned, for owners of a group or all, and have not returned."""
        self._lost = [(owner, thread) for owner, thread in self._lost if thread.is_alive()]
        return sum(group is None or owner == group for owner, _ in self._lost)

    def _check(self, thread: _Thread, cpu_ns: int, *, is_stuck: bool) -> None:
        """Abandon the thread if its call is overdue."""
        with thread.lock:
            if thread.call is None:
                return
            owner, began_ns = thread.call
            if cpu_ns - began_ns <= self._max_call_ns and not is_stuck:
                return
            thread.is_abandoned = True
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread.native_id or 0, _LOWEST_PRIORITY)
        self._thread = None
        self._lost.append((getattr(owner, "tenant", None), thread))
        raise Overdue(owner)


def _begin(thread: _Thread, call: tuple[Any, int] | None) -> None:
    """Note the call that begins, or that none is under way; an abandoned thread goes no further."""
    with thread.lock:
        if thread.is_abandoned:
            raise _Abandoned
        thread.call = call
