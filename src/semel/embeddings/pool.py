"""A few connections to one node, shared by threads.

A connection is opened by a thread of its own, which has more time than a call: a call that comes meanwhile waits for it
no longer than its deadline, and the next one finds it open. So neither a slow handshake nor a name server can hold a
call, and a store that is farther away than a fetch may take is still reached.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from semel.embeddings.connection import Connection
from semel.embeddings.protocol import StoreDown, StoreError, StoreLate
from semel.embeddings.replies import Refusal

__all__ = ["Pool"]

_CONNECT_S: Final = 5.0


class Pool:
    """At most `limit` connections, open or being opened."""

    def __init__(self, connect: Callable[[float], Connection], limit: int) -> None:
        self._connect = connect
        self._limit = limit
        self._changed = threading.Condition()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._opening = 0
        self._failures = 0
        self._failure: StoreError = StoreDown("the embedding store is not connected")
        self._is_closed = False

    @contextmanager
    def connection(self, deadline: float) -> Iterator[Connection]:
        """Lend a connection for one exchange. It is kept if that ends well, or with a store that is full."""
        connection = self._take(deadline)
        is_usable = False
        try:
            yield connection
            is_usable = True
        except Refusal as refusal:
            is_usable = refusal.code == "OOM"
            raise refusal.error() from refusal
        finally:
            self._give_back(connection, is_usable=is_usable)

    def close(self) -> None:
        """Close all connections, also those in use. Nobody gets one any more."""
        with self._changed:
            self._is_closed = True
            for connection in self._idle:
                connection.close()
            self._idle.clear()
            for connection in self._busy:
                connection.shut()
            self._changed.notify_all()

    def _take(self, deadline: float) -> Connection:
        with self._changed:
            failures = self._failures
            while not self._is_closed:
                while self._idle:
                    connection = self._idle.pop()
                    if connection.is_idle():
                        self._busy.add(connection)
                        return connection
                    connection.close()
                if failures != self._failures:
                    raise self._failure
                if len(self._busy) + self._opening < self._limit:
                    self._opening += 1
                    threading.Thread(target=self._open, name="semel-embedding-store", daemon=True).start()
                if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    raise StoreLate("the embedding store gave no connection in time")
            raise StoreDown("the connections to the embedding store were closed")

    def _give_back(self, connection: Connection, *, is_usable: bool) -> None:
        with self._changed:
            self._busy.discard(connection)
            if is_usable and not self._is_closed:
                self._idle.append(connection)
            else:
                connection.close()
            self._changed.notify()

    def _open(self) -> None:
        connection: Connection | None = None
        failure: StoreError | None = None
        try:
            connection = self._connect(time.monotonic() + _CONNECT_S)
        except Refusal as refusal:
            failure = refusal.error()
        except StoreError as error:
            failure = error
        with self._changed:
            self._opening -= 1
            if connection is not None and not self._is_closed:
                self._idle.append(connection)
            elif connection is not None:
                connection.close()
            else:
                self._failures += 1
                self._failure = failure or self._failure
            self._changed.notify_all()
