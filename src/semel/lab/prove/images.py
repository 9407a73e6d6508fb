"""A server of images on this machine, which counts what is fetched from it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

__all__ = ["ImageServer", "serving_images"]


@dataclass(slots=True)
class ImageServer:
    """Image N is `/N.png`."""

    images: Sequence[bytes]
    port: int = 0
    fetches: int = 0

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection."""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                name = head.split(b" ", 2)[1].decode().removeprefix("/").removesuffix(".png")
                body = self.images[int(name)]
                self.fetches += 1
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nCache-Control: max-age=600\r\n"
                    b"Content-Length: %d\r\n\r\n" % len(body)
                )
                writer.write(body)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()


@asynccontextmanager
async def serving_images(images: Sequence[bytes]) -> AsyncIterator[ImageServer]:
    """Serve images until the end of the block."""
    images_server = ImageServer(images)
    server = await asyncio.start_server(images_server.answer, "127.0.0.1", 0)
    images_server.port = server.sockets[0].getsockname()[1]
    try:
        yield images_server
    finally:
        server.close()
