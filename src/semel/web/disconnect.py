"""Detection of clients that disconnect while they are answered.

semel's own server calls back, which costs nothing while a client stays (`semel.web.connection`). With any other server
a task waits for the message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from starlette.types import Receive, Scope

__all__ = ["DISCONNECT", "DisconnectWatch", "on_disconnect"]

DISCONNECT: Final = "semel.disconnect"
"""The extension of a request's scope that takes calls to make when the client disconnects before it is answered."""


def on_disconnect(scope: Scope, call: Callable[[], None]) -> bool:
    """Have a call made when the client disconnects before its response is complete; False if the server makes none."""
    extension = (scope.get("extensions") or {}).get(DISCONNECT)
    if extension is None:
        return False
    extension["watch"](call)
    return True


class DisconnectWatch:
    """A scope whose task is cancelled when the client disconnects. The request's body must have been read.

    Other than to say so in `has_left`, the scope then ends as if nothing had happened. A cancellation that comes from
    elsewhere goes on as one.
    """

    __slots__ = ("_cancelling", "_is_over", "_receive", "_scope", "_task", "_waiting", "has_left")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._scope = scope
        self._receive = receive
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._waiting: asyncio.Future[None] | None = None
        self._is_over = False
        self.has_left = False

    def __enter__(self) -> Self:
        self._task = task = asyncio.current_task()
        assert task is not None
        self._cancelling = task.cancelling()
        if not on_disconnect(self._scope, self._leave):
            self._waiting = asyncio.ensure_future(self._wait())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._is_over = True
        if self._waiting is not None:
            self._waiting.cancel()
        if not self.has_left:
            return False
        assert self._task is not None
        is_alone = self._task.uncancel() <= self._cancelling
        return is_alone and isinstance(error, asyncio.CancelledError)

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _leave(self) -> None:
        if not self._is_over:
            assert self._task is not None
            self.has_left = True
            self._task.cancel()
