"""An event loop whose time passes only when nothing is left to do: it jumps to the next timer instead of waiting.

Timers and tasks of shipped code run on it unchanged, in the same order each time: no threads, no sockets, no signals.
What would run in a thread runs at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["Stuck", "VirtualLoop", "run"]

_T = TypeVar("_T")


class Stuck(RuntimeError):
    """Everybody waits, and nothing will ever happen."""


class _Selector:
    """In the place of a selector: it waits for nobody and lets time pass."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[tuple[object, int]]:
        if timeout is None:
            raise Stuck(f"at {self._loop.time():.6f} s nothing is due, and nobody is done")
        if timeout > 0:
            self._loop.skip()
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """Time begins at 0."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._selector = _Selector(self)
        self._clock_resolution = 1e-12

    def time(self) -> float:
        """Seconds since the beginning."""
        return self._now_s

    def skip(self) -> None:
        """Let time pass until the next timer."""
        self._now_s = max(self._now_s, self._scheduled[0].when())  # type: ignore[attr-defined]

    def run_in_executor(self, executor: Any, func: Callable[..., _T], *args: Any) -> asyncio.Future[_T]:  # type: ignore[override] # noqa: ARG002
        """Run it now: a thread would end whenever it likes."""
        future: asyncio.Future[_T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it is the caller's
            future.set_exception(error)
        return future

    def _process_events(self, events: list[tuple[object, int]]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine under a virtual clock. Tasks that it leaves are cancelled."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        with contextlib.suppress(Stuck):
            loop.run_until_complete(_end(loop))
        loop.close()


async def _end(loop: VirtualLoop) -> None:
    left = asyncio.all_tasks(loop) - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    await loop.shutdown_asyncgens()
