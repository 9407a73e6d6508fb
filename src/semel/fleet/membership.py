"""Membership of a fleet, as its roster says: links are opened to workers that join and closed to those that leave.

A worker that leaves gets no more requests and is let go when it has answered those that it has. One that is named again
meanwhile stays. The rest of the fleet notices nothing.

When transport keys are rotated, a second link is opened to each worker with the newest keys. Once the worker has
announced its items there, new requests take that link, and the first one ends with its last answer. So no request is
lost, and nothing is sent or encoded again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Final

from semel.errors import ConfigError
from semel.fleet.fleet import Fleet
from semel.fleet.worker import RemoteWorker
from semel.wire.keys import TransportKeys

__all__ = ["Connect", "Membership"]

Connect = Callable[[str], AbstractAsyncContextManager[RemoteWorker]]
"""Opens the link to the worker at an address, until it is left."""

_RENEW_S: Final = 0.5

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Member:
    """A worker that is linked."""

    worker: RemoteWorker
    link: AsyncExitStack
    leaving: asyncio.Task[None] | None = None
    renewing: asyncio.Task[None] | None = None


class Membership:
    """The workers of a fleet by their addresses."""

    def __init__(
        self, fleet: Fleet, connect: Connect, *, renew: Connect | None = None, keys: TransportKeys | None = None
    ) -> None:
        self._fleet = fleet
        self._connect = connect
        self._renewing = renew  # as `connect`, with the newest keys only
        self._keys = keys
        self._members: dict[str, _Member] = {}
        self._is_closed = False
        self._replaced: set[_Member] = set()  # older links to workers that have a newer one, until their last answer

    async def join(self, address: str) -> None:
        """Link to a worker; a `ConfigError` if there can be no link."""
        link = AsyncExitStack()
        worker = await link.enter_async_context(self._connect(address))
        self._members[address] = _Member(worker, link)
        self._fleet.add(worker)

    async def close(self) -> None:
        """Close all links, whatever they are needed for."""
        self._is_closed = True
        members, self._members = self._members, {}
        for member in members.values():
            self._fleet.remove(member.worker)
            await _end_renewal(member)
            await member.link.aclose()
        for member in self._replaced:
            await member.link.aclose()

    async def run(self, lists: AsyncIterable[Iterable[str]]) -> None:
        """Take in what the workers send, and follow the lists of those that should be here."""
        async with asyncio.TaskGroup() as group:
            for member in self._members.values():
                group.create_task(member.worker.run())
            if self._renewing is not None:
                group.create_task(self._keep_newest(group, self._renewing))
            async for addresses in lists:
                await self._follow(set(addresses), group)

    def replace_keys(self, keys: TransportKeys) -> None:
        """Move every link to the newest of these keys soon; links with keys that are not among them end now."""
        self._keys = keys
        for member in (*self._members.values(), *self._replaced):
            if member.renewing is not None:
                member.renewing.cancel()  # it insists on keys that are not the newest any more
            member.worker.replace_keys(keys)

    async def _keep_newest(self, group: asyncio.TaskGroup, connect: Connect) -> None:
        """Renew links that have older keys, whenever and however they were opened."""
        while not self._is_closed:
            await asyncio.sleep(_RENEW_S)
            for address, member in self._members.items():
                is_idle = member.leaving is None and (member.renewing is None or member.renewing.done())
                if is_idle and self._is_old(member.worker):
                    member.renewing = group.create_task(self._renew(address, member, group, connect))

    def _is_old(self, worker: RemoteWorker) -> bool:
        return self._keys is not None and worker.is_connected and worker.generation != self._keys.newest.number

    async def _renew(self, address: str, member: _Member, group: asyncio.TaskGroup, connect: Connect) -> None:
        """Reach a worker over a second link, however long it takes until the worker has the newest keys too."""
        link = AsyncExitStack()
        async with AsyncExitStack() as unless_replaced:
            unless_replaced.push_async_callback(link.aclose)
            try:
                worker = await link.enter_async_context(connect(address))
            except ConfigError as error:  # the next try may be better
                logger.error("the link to %s cannot be renewed: %s", address, error)  # noqa: TRY400
                return
            unless_replaced.callback(group.create_task(worker.run()).cancel)
            await worker.until_settled()
            if self._members.get(address) is not member or member.leaving is not None or not worker.is_connected:
                return
            unless_replaced.pop_all()
        self._members[address] = _Member(worker, link)
        self._replaced.add(member)
        self._fleet.replace(member.worker, worker)
        logger.info("the worker at %s is reached with keys of generation %d", address, worker.generation)
        group.create_task(self._end_replaced(member))

    async def _end_replaced(self, member: _Member) -> None:
        await member.worker.until_idle()
        self._replaced.discard(member)
        await member.link.aclose()

    async def _follow(self, addresses: set[str], group: asyncio.TaskGroup) -> None:
        for address in sorted(addresses - self._members.keys()):
            try:
                await self.join(address)
            except ConfigError as error:  # the others serve on, and the next list may be better
                logger.error("the worker at %s cannot join: %s", address, error)  # noqa: TRY400
            else:
                group.create_task(self._members[address].worker.run())
                logger.info("the worker at %s joins", address)
        for address, member in self._members.items():
            if address not in addresses and member.leaving is None:
                member.leaving = group.create_task(self._leave(address, member))
            elif address in addresses and member.leaving is not None:
                member.leaving.cancel()
                member.leaving = None
                self._fleet.restore(member.worker)

    async def _leave(self, address: str, member: _Member) -> None:
        """Let a worker finish, then go."""
        logger.info("the worker at %s leaves", address)
        self._fleet.retire(member.worker)
        await member.worker.until_idle()
        del self._members[address]  # from here on it cannot be kept
        self._fleet.remove(member.worker)
        await _end_renewal(member)
        await member.link.aclose()


async def _end_renewal(member: _Member) -> None:
    """Close the second link to a worker that goes: it would be tried for ever."""
    if member.renewing is not None:
        member.renewing.cancel()
        await asyncio.gather(member.renewing, return_exceptions=True)
