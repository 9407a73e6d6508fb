"""The nodes of a store, each on its own, and which of them has an entry.

An entry is on the node that its name ranks highest (rendezvous hash), so workers need no list that they agree on beyond
the addresses. Each node has its own circuit breaker: a node that is gone is misses for its entries, and nothing else.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from semel.core import Digest
from semel.core.rendezvous import rank
from semel.embeddings.protocol import BlobStore, StoreDown, StoreError, StoreFull
from semel.embeddings.resp import RespStore
from semel.embeddings.settings import EmbeddingStoreSettings
from semel.errors import ConfigError

__all__ = ["Breaker", "Node", "Nodes", "StoreSuspended", "open_nodes"]

_FAILURES: Final = 3
_FIRST_WAIT_S: Final = 1.0
_MAX_WAIT_S: Final = 60.0

logger = logging.getLogger(__name__)

Clock = Callable[[], float]


class StoreSuspended(StoreDown):
    """The store failed a moment ago, and is not asked."""


class Breaker:
    """Circuit breaker for a store that fails. Pure: the clock is passed in. One thread at a time may call it.

    Closed, it lets every call through. After some failures in a row it opens, for 1 s; then one call at a time is let
    through as a trial. A trial that fails opens it for twice as long, up to a minute. One that succeeds closes it. How
    long it was open is forgotten only when as many calls have succeeded after that: a store may answer pings only.
    """

    __slots__ = ("_backoff_s", "_epoch", "_failures", "_is_trial", "_opened_until", "_successes", "_wait_s")

    def __init__(self) -> None:
        self._failures = 0
        self._wait_s = 0.0
        """For how long it is open; 0 if it is closed."""
        self._backoff_s = 0.0
        """The last value of `_wait_s`; 0 once that is forgotten."""
        self._successes = 0
        """Since it was closed."""
        self._opened_until = 0.0
        self._is_trial = False
        self._epoch = 0
        """Changes whenever the state does: what a call of another state came to says nothing about this one."""

    @property
    def is_closed(self) -> bool:
        """True if the store is taken to be up."""
        return not self._wait_s

    def begin(self, now: float) -> int | None:
        """Ask for leave to make a call. Returns a permit for `end`, or None if there must be no call."""
        if self._wait_s:
            if self._is_trial or now < self._opened_until:
                return None
            self._is_trial = True
            self._epoch += 1
        return self._epoch

    def end(self, permit: int, now: float, *, is_ok: bool) -> None:
        """Say what a call came to. Every permit must end."""
        if permit != self._epoch:
            return
        if is_ok:
            self._failures = 0
            if self._wait_s:
                self._wait_s, self._successes = 0.0, 0
                self._change()
            else:
                self._successes += 1
                if self._successes >= _FAILURES:
                    self._backoff_s = 0.0
            return
        self._failures += 1
        if self._wait_s or self._failures >= _FAILURES:
            self._wait_s = self._backoff_s = min(max(2 * self._backoff_s, _FIRST_WAIT_S), _MAX_WAIT_S)
            self._opened_until = now + self._wait_s
            self._change()

    def _change(self) -> None:
        self._failures = 0
        self._is_trial = False
        self._epoch += 1


class Node:
    """A node and its breaker. Any thread may use it."""

    def __init__(self, name: str, blobs: BlobStore, *, clock: Clock = time.monotonic) -> None:
        self.name = name
        self.blobs = blobs
        self._clock = clock
        self._breaker = Breaker()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Node({self.name}, {'up' if self.is_up else 'down'})"

    @property
    def is_up(self) -> bool:
        """True if calls are let through."""
        with self._lock:
            return self._breaker.is_closed

    @contextmanager
    def attempt(self) -> Iterator[BlobStore]:
        """Let the node be asked, unless it failed a moment ago; then `StoreSuspended` is raised."""
        with self._lock:
            permit = self._breaker.begin(self._clock())
        if permit is None:
            raise StoreSuspended(f"the embedding store's node {self.name} failed a moment ago")
        failure: BaseException | None = None
        try:
            yield self.blobs
        except StoreFull:
            raise
        except BaseException as error:
            failure = error
            raise
        finally:
            with self._lock:
                was_up = self._breaker.is_closed
                self._breaker.end(permit, self._clock(), is_ok=failure is None)
                is_up = self._breaker.is_closed
            self._report(was_up, is_up, failure)

    def _report(self, was_up: bool, is_up: bool, failure: BaseException | None) -> None:
        """Say in the log when it goes down, and why, and when it is back."""
        if was_up and not is_up:
            reason = failure if isinstance(failure, StoreError) else type(failure).__name__
            logger.warning("the embedding store's node %s is down, and is tried again: %s", self.name, reason)
        elif is_up and not was_up:
            logger.info("the embedding store's node %s answers again", self.name)


class Nodes:
    """All nodes of a store."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = tuple(nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    def choose(self, name: Digest) -> Node:
        """Return the node that has an entry."""
        return max(self._nodes, key=lambda node: rank(node.name, name))

    @property
    def is_up(self) -> bool:
        """True if any node is up."""
        return any(node.is_up for node in self._nodes)

    @property
    def is_whole(self) -> bool:
        """True if every node is up."""
        return all(node.is_up for node in self._nodes)

    def ping(self, timeout_s: float) -> dict[str, StoreError | None]:
        """Ask every node whether it answers. Returns what is wrong with each."""
        found: dict[str, StoreError | None] = {}
        for node in self._nodes:
            try:
                node.blobs.ping(time.monotonic() + timeout_s)
            except StoreError as error:
                found[node.name] = error
            else:
                found[node.name] = None
        return found

    def revive(self, timeout_s: float) -> None:
        """Ask every node that is down, and due to be tried, whether it answers again."""
        for node in self._nodes:
            if not node.is_up:
                with suppress(StoreError), node.attempt() as blobs:
                    blobs.ping(time.monotonic() + timeout_s)

    def close(self) -> None:
        """Close all connections."""
        for node in self._nodes:
            node.blobs.close()


def open_nodes(settings: EmbeddingStoreSettings, password: str | None = None) -> Nodes | None:
    """Return the nodes that the settings name; None without a store. Connections are opened when they are needed."""
    addresses = settings.addresses()
    if not addresses:
        return None
    tls = _tls(settings) if any(address.is_encrypted for address in addresses) else None
    blobs = [RespStore(one, tls=tls if one.is_encrypted else None, password=password) for one in addresses]
    return Nodes([Node(one.address.name, one) for one in blobs])


def _tls(settings: EmbeddingStoreSettings) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=settings.ca)
    except OSError as error:  # an SSLError is one
        raise ConfigError(
            f"--embedding-store-ca {settings.ca}: cannot be read as certificates ({error.strerror or error}); it must "
            "be a PEM file"
        ) from error
