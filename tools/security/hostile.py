"""Fifty hostile clients in a process of their own: `python -m tools.security.hostile PORT KEY refused|expensive`.

They have the key of a tenant. What they send is refused, in the one set of kinds; in the other it is valid, and costs
as much as a valid request may.

A line "go" on standard input lets them begin, and "begun" is printed when each kind has been answered; a line "stop"
ends them all at once and prints what they were answered: by kind, how often with which status. Each client sends its
next request as soon as the last one is answered, so fifty are there at any time. They are on other machines in life:
here they run after the frontend, so that what they spend on making requests is not taken from it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import random
import struct
import sys
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

from PIL import Image

CLIENTS: Final = 50
CHAT: Final = "/v1/chat/completions"
CHUNK: Final = 65_536
SLOW_S: Final = 0.05
NICE: Final = 10

Chunks = AsyncIterator[bytes]
"""A request on its way, head and all."""


def head(length: int | None, path: str = CHAT) -> bytes:
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    key = f"Authorization: Bearer {sys.argv[2]}\r\n"
    return f"POST {path} HTTP/1.1\r\nHost: h\r\n{key}Content-Type: application/json\r\n{framing}\r\n\r\n".encode()


async def whole(body: bytes, path: str = CHAT) -> Chunks:
    yield head(len(body), path) + body


def chat(*parts: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 4}).encode()


def image(data: bytes) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}


def png(width: int, height: int, packed: bytes) -> bytes:
    """Return an image of one bit a pixel, by hand."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


BOMB: Final = zlib.compress(bytes(20_000 * 2_501), 9)


def jpeg(seed: random.Random, side: int) -> bytes:
    file = io.BytesIO()
    Image.frombytes("L", (side, side), seed.randbytes(side * side)).save(file, "JPEG")
    return file.getvalue()


def corrupt(seed: random.Random) -> Chunks:
    """Return an image that is cut off or no image at all, each another one: nothing is found in a cache."""
    whole_file = jpeg(seed, 64)
    return whole(chat(image(whole_file[: len(whole_file) // 2] if seed.random() < 0.5 else seed.randbytes(2_000))))


def bomb(seed: random.Random) -> Chunks:
    """50 kB that would be 400 million pixels."""
    return whole(chat(image(png(20_000, 20_000, BOMB + seed.randbytes(8)))))


async def announced(_: random.Random) -> Chunks:
    yield head(1 << 40) + b'{"messages": '


async def endless(_: random.Random) -> Chunks:
    """Yield a body without a length, which goes on until it is refused."""
    yield head(None) + b"f\r\n" + b'{"messages": [ ' + b"\r\n"
    chunk = f"{CHUNK:x}\r\n".encode() + b" " * CHUNK + b"\r\n"
    while True:
        yield chunk


async def slow(_: random.Random) -> Chunks:
    yield head(1_000_000) + b'{"messages": '
    for _number in range(100):
        await asyncio.sleep(SLOW_S)
        yield b" "


def url(seed: random.Random) -> Chunks:
    host = seed.choice(
        ["169.254.169.254", "127.0.0.1:22", "localhost", "[::1]", "10.0.0.1", "metadata.google.internal"]
    )
    return whole(chat({"type": "image_url", "image_url": {"url": f"{seed.choice(['http', 'https'])}://{host}/x"}}))


def deep(_: random.Random) -> Chunks:
    return whole(b'{"messages": [{"role": "user", "content": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]}")


def many_parts(seed: random.Random) -> Chunks:
    return whole(chat(*(image(seed.randbytes(64)) for _ in range(1_000))))


def many_values(_: random.Random) -> Chunks:
    return whole(b'{"messages": [{"role": "user", "content": [' + b"{}," * 300_000 + b"{}]}]}")


def large_images(seed: random.Random) -> Chunks:
    """As many new images as a request may have, of a size that people send."""
    return whole(chat(image(jpeg(seed, 768)), image(jpeg(seed, 768)), {"type": "text", "text": "?"}))


def long_text(seed: random.Random) -> Chunks:
    """Return a prompt that nearly fills the model's length, another one each time."""
    return whole(chat({"type": "text", "text": " ".join(str(seed.randrange(10)) for _ in range(1_000))}))


def many_prompts(seed: random.Random) -> Chunks:
    prompts = [f"{seed.random()} hello" for _ in range(64)]
    return whole(json.dumps({"prompt": prompts, "max_tokens": 4}).encode(), "/v1/completions")


Kinds = dict[str, Callable[[random.Random], Chunks]]

REFUSED: Final[Kinds] = {
    kind.__name__: kind for kind in (corrupt, bomb, announced, endless, slow, url, deep, many_parts, many_values)
}
"""None of these is ever answered with 200."""

EXPENSIVE: Final[Kinds] = {kind.__name__: kind for kind in (large_images, long_text, many_prompts)}
"""All of these are."""


async def attack(port: int, number: int, kinds: Kinds, counts: Counter[str]) -> None:
    """One client; its kind of harm is its own."""
    seed = random.Random(os.getpid() * 1_000 + number)
    name, kind = list(kinds.items())[number % len(kinds)]
    while True:
        try:
            status = await exchange(port, kind(seed))
        except OSError:
            status = "cut off"
        counts[f"{name} {status}"] += 1


async def exchange(port: int, chunks: Chunks) -> str:
    """Send a request until it is answered; the status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sending = asyncio.create_task(send(writer, chunks))
    try:
        line = await reader.readline()
        return line.split(b" ")[1].decode() if line else "cut off"
    finally:
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await sending
        writer.transport.abort()


async def send(writer: asyncio.StreamWriter, chunks: Chunks) -> None:
    async for chunk in chunks:
        writer.write(chunk)
        await writer.drain()


def lines() -> Iterator[str]:
    return (line.strip() for line in sys.stdin)


async def main(port: int, kinds: Kinds) -> None:
    commands = lines()
    for command in iter(lambda: next(commands, ""), ""):
        if command != "go":
            continue
        counts: Counter[str] = Counter()
        clients = [asyncio.create_task(attack(port, number, kinds, counts)) for number in range(CLIENTS)]
        while len({answer.split()[0] for answer in counts}) < len(kinds.keys() - {"slow"}):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        print("begun", flush=True)
        await asyncio.to_thread(next, commands, "")
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        print(json.dumps(dict(sorted(counts.items()))), flush=True)


if __name__ == "__main__":
    os.nice(NICE)
    asyncio.run(main(int(sys.argv[1]), EXPENSIVE if sys.argv[3] == "expensive" else REFUSED))
