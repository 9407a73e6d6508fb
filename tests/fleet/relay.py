"""A relay between a frontend and its worker that counts the bytes which the frontend sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Relay:
    """Passes on what comes, both ways."""

    address: str
    target: Path
    sent: int = 0
    """Bytes from frontends to the worker."""

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, downstream = await asyncio.open_unix_connection(self.target)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, downstream, counted=True))
                group.create_task(self._pump(upstream, writer, counted=False))
        finally:
            writer.close()
            downstream.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counted: bool) -> None:
        while data := await reader.read(1 << 16):
            self.sent += len(data) * counted
            writer.write(data)
            await writer.drain()
        writer.close()


@asynccontextmanager
async def relaying(path: Path, worker: str) -> AsyncIterator[Relay]:
    """A relay that listens at `path` for a worker's `ipc://` address."""
    relay = Relay(f"ipc://{path}", Path(worker.removeprefix("ipc://")))
    server = await asyncio.start_unix_server(relay.pass_on, path)
    try:
        yield relay
    finally:
        server.close()
        await asyncio.to_thread(path.unlink, missing_ok=True)
