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

from semel.core import Digest
from semel.core.rendezvous import rank
from semel.embeddings.address import StoreAddress
from semel.embeddings.breaker import Breaker
from semel.embeddings.protocol import BlobStore, StoreDown, StoreError, StoreFull
from semel.embeddings.resp import RespStore
from semel.embeddings.settings import EmbeddingStoreSettings
from semel.errors import ConfigError

__all__ = ["Node", "Nodes", "StoreSuspended", "open_nodes"]

logger = logging.getLogger(__name__)

Clock = Callable[[], float]


class StoreSuspended(StoreDown):
    """The store failed a moment ago, and is not asked."""


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

    def __len__(self) -> int:
        return len(self._nodes)

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
    return Nodes([Node(address.name, _open(address, tls, password)) for address in addresses])


def _open(address: StoreAddress, tls: ssl.SSLContext | None, password: str | None) -> RespStore:
    return RespStore(address, tls=tls if address.is_encrypted else None, password=password)


def _tls(settings: EmbeddingStoreSettings) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=settings.ca)
    except OSError as error:  # an SSLError is one
        raise ConfigError(
            f"--embedding-store-ca {settings.ca}: cannot be read as certificates ({error.strerror or error}); it must "
            "be a PEM file"
        ) from error
