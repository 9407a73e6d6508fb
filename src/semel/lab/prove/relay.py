"""A relay between frontends and a worker over tcp, whose link can be cut and mended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

__all__ = ["Relay", "relaying"]

_PIECE_BYTES: Final = 1 << 16
_CLOSING_S: Final = 0.01


@dataclass(slots=True)
class Relay:
    """Forwards each connection to a worker; while it is cut, connections end and none is taken."""

    target: str
    address: str = ""
    is_cut: bool = False
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _open: int = 0

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection, both ways, until either side ends it."""
        address = urlsplit(self.target)
        writers = {writer}
        self._open += 1
        try:
            if self.is_cut:
                return
            upstream, downstream = await asyncio.open_connection(address.hostname, address.port)
            writers.add(downstream)
            self._writers |= writers
            pumps = {asyncio.create_task(_pump(*pair)) for pair in ((reader, downstream), (upstream, writer))}
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
        except OSError:
            return
        finally:
            self._open -= 1
            self._writers -= writers
            for one in writers:
                one.transport.abort()

    async def cut(self, seconds: float) -> None:
        """End all connections, and take none for so long."""
        self.is_cut = True
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(seconds)
        self.is_cut = False

    async def close(self) -> None:
        """End all connections, and wait until they have ended."""
        self.is_cut = True
        while self._open:
            for writer in list(self._writers):
                writer.transport.abort()
            await asyncio.sleep(_CLOSING_S)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(_PIECE_BYTES):
            writer.write(data)
            await writer.drain()
    except OSError:
        return


@asynccontextmanager
async def relaying(target: str) -> AsyncIterator[Relay]:
    """Relay to a `tcp://` address until the end of the block."""
    relay = Relay(target)
    server = await asyncio.start_server(relay.forward, "127.0.0.1", 0)
    relay.address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield relay
    finally:
        server.close()
        await relay.close()
