"""Publisher of a worker's updates (`cache_updates`) to its frontends: when due, and as fast as they are read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from math import inf

from semel.core import Digest, FeatureInfo
from semel.ledger import Holdings
from semel.wire.translation import to_status
from semel.wire.zmq import Peer, WorkerListener
from semel.worker.cache_updates import CacheUpdates, Load, StateDelta

__all__ = ["Publisher"]


class Publisher:
    """The sender of a worker's cache updates."""

    def __init__(self, listener: WorkerListener, updates: CacheUpdates[Peer]) -> None:
        self._listener = listener
        self._updates = updates
        self._timer: asyncio.TimerHandle | None = None
        self._slices: dict[Peer, asyncio.Task[None]] = {}
        """Of frontends that read what the engine has."""

    @property
    def holdings(self) -> Holdings[Peer]:
        """The items that the engine has."""
        return self._updates.holdings

    def hold(self, digest: Digest, holding: FeatureInfo) -> None:
        """Add an item that the engine has stored."""
        self._updates.hold(digest, holding, self._now)
        self._set_timer()

    def drop(self, digest: Digest) -> None:
        """Remove an item that the engine has evicted."""
        self._updates.drop(digest, self._now)
        self._set_timer()

    def set_load(self, load: Load) -> None:
        """Set the load of the engine."""
        self._updates.set_load(load, self._now)
        self._set_timer()

    def join(self, peer: Peer, known: int | None) -> None:
        """Tell a new frontend everything, or what has changed since it knew everything."""
        self._send(self._updates.join(peer, known))
        if self.holdings.known(peer)[1]:
            self._slices[peer] = asyncio.create_task(self._tell_slices(peer))

    def leave(self, peer: Peer) -> None:
        """Forget a frontend."""
        self._updates.leave(peer)
        if (task := self._slices.pop(peer, None)) is not None:
            task.cancel()

    def tell(self, peer: Peer) -> None:
        """Tell a frontend what is new, before a message about its request."""
        self._send(self._updates.concerning(peer))

    def publish(self) -> None:
        """Tell all of them now."""
        self._send(self._updates.publish(self._now))

    def stop(self) -> None:
        """Tell nobody anything more."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _set_timer(self) -> None:
        if self._timer is None and (due := self._updates.due) < inf:
            self._timer = asyncio.get_running_loop().call_at(due, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self._send(self._updates.next_turn(self._now))
        self._set_timer()

    async def _tell_slices(self, peer: Peer) -> None:
        """Send a snapshot at the pace at which it is read: who connects to many workers gets no more than that."""
        while True:
            await asyncio.sleep(0)
            await self._listener.until_read(peer)
            if (delta := self._updates.next_slice(peer)) is None:
                self._slices.pop(peer, None)
                return
            self._send([delta])

    def _send(self, deltas: Iterable[StateDelta[Peer]]) -> None:
        for delta in deltas:
            self._listener.send_all(delta.peers, to_status(delta.announcement, *delta.load))
