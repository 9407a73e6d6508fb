"""Tells frontends what they have yet to be told (`news`): when it is due, and as fast as they read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from math import inf

from semel.core import Digest, FeatureInfo
from semel.ledger import Holdings
from semel.wire.translation import to_status
from semel.wire.zmq import Peer, WorkerListener
from semel.worker.news import Bulletin, Load, News

__all__ = ["Publisher"]


class Publisher:
    """Sends a worker's news."""

    def __init__(self, listener: WorkerListener, news: News[Peer]) -> None:
        self._listener = listener
        self._news = news
        self._timer: asyncio.TimerHandle | None = None
        self._slices: dict[Peer, asyncio.Task[None]] = {}
        """Of frontends that read what the engine has."""

    @property
    def holdings(self) -> Holdings[Peer]:
        """What the engine has."""
        return self._news.holdings

    def hold(self, digest: Digest, holding: FeatureInfo) -> None:
        """The engine has an item from now on."""
        self._news.hold(digest, holding, self._now)
        self._set_timer()

    def drop(self, digest: Digest) -> None:
        """The engine no longer has an item."""
        self._news.drop(digest, self._now)
        self._set_timer()

    def set_load(self, load: Load) -> None:
        """The engine is as busy as that from now on."""
        self._news.set_load(load, self._now)
        self._set_timer()

    def join(self, peer: Peer, known: int | None) -> None:
        """Tell a new frontend everything, or what has changed since it knew everything."""
        self._publish(self._news.join(peer, known))
        if self.holdings.known(peer)[1]:
            self._slices[peer] = asyncio.create_task(self._tell_slices(peer))

    def leave(self, peer: Peer) -> None:
        """A frontend has gone."""
        self._news.leave(peer)
        if (task := self._slices.pop(peer, None)) is not None:
            task.cancel()

    def tell(self, peer: Peer) -> None:
        """Tell a frontend what is new, before a message about its request."""
        self._publish(self._news.concerning(peer))

    def tell_all(self) -> None:
        """Tell all of them now."""
        self._publish(self._news.tell_all(self._now))

    def stop(self) -> None:
        """Tell nobody anything more."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _set_timer(self) -> None:
        if self._timer is None and (due := self._news.due) < inf:
            self._timer = asyncio.get_running_loop().call_at(due, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self._publish(self._news.next_turn(self._now))
        self._set_timer()

    async def _tell_slices(self, peer: Peer) -> None:
        """Send a snapshot at the pace at which it is read: who connects to many workers gets no more than that."""
        while True:
            await asyncio.sleep(0)
            await self._listener.until_read(peer)
            if (bulletin := self._news.next_slice(peer)) is None:
                self._slices.pop(peer, None)
                return
            self._publish([bulletin])

    def _publish(self, bulletins: Iterable[Bulletin[Peer]]) -> None:
        for bulletin in bulletins:
            self._listener.send_all(bulletin.peers, to_status(bulletin.announcement, *bulletin.load))
