"""Who is in a fleet, as its roster says: links are opened to workers that join and closed to those that leave.

A worker that leaves gets no more requests and is let go when it has answered those that it has. One that is named again
meanwhile stays. The rest of the fleet notices nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass

from semel.errors import ConfigError
from semel.fleet.fleet import Fleet
from semel.fleet.worker import RemoteWorker

__all__ = ["Connect", "Membership"]

Connect = Callable[[str], AbstractAsyncContextManager[RemoteWorker]]
"""Opens the link to the worker at an address, until it is left."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Member:
    """A worker that is linked."""

    worker: RemoteWorker
    link: AsyncExitStack
    leaving: asyncio.Task[None] | None = None


class Membership:
    """The workers of a fleet by their addresses."""

    def __init__(self, fleet: Fleet, connect: Connect) -> None:
        self._fleet = fleet
        self._connect = connect
        self._members: dict[str, _Member] = {}

    async def join(self, address: str) -> None:
        """Link to a worker; a `ConfigError` if there can be no link."""
        link = AsyncExitStack()
        worker = await link.enter_async_context(self._connect(address))
        self._members[address] = _Member(worker, link)
        self._fleet.add(worker)

    async def close(self) -> None:
        """Close all links, whatever they are needed for."""
        members, self._members = self._members, {}
        for member in members.values():
            self._fleet.remove(member.worker)
            await member.link.aclose()

    async def run(self, lists: AsyncIterable[Iterable[str]]) -> None:
        """Take in what the workers send, and follow the lists of those that should be here."""
        async with asyncio.TaskGroup() as group:
            for member in self._members.values():
                group.create_task(member.worker.run())
            async for addresses in lists:
                await self._follow(set(addresses), group)

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
        await member.link.aclose()
