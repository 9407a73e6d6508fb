"""Attacks on what the security review found: each is valid and cheap to accept, and expensive later."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import random
import re
import secrets
import socket
import struct
import zlib
from collections.abc import Callable
from typing import Final

import httpx
from PIL import Image

from tools.security.attacker import BUDGET_BYTES, CHAT, MIB, Attacker, chat, image, png_url, schema, text

__all__ = [
    "aborts",
    "compressed",
    "enlarged",
    "expensive_grammar",
    "expensive_images",
    "expensive_regex",
    "failing_streams",
    "hidden_regex",
    "nothing",
    "refused_schema",
    "slow_downloads",
    "strangers",
    "unknown_files",
]

FILES: Final = "/v1/files"
_EXPENSIVE: Final = "(a{0,30}){0,30}(a|aa){0,200}"


async def expensive_regex(attacker: Attacker) -> None:
    """A regular expression that compiles in 2 ms and takes 842 ms for each token after the seventeenth."""
    held = await _staying(attacker)
    await attacker.flood(2, lambda number: held({"regex": f"{_EXPENSIVE}b{{1,{number + 1}}}"}))


async def expensive_grammar(attacker: Attacker) -> None:
    """A grammar that reads a text of `a` in very many ways."""
    held = await _staying(attacker)
    rules = 'root ::= e "{}"\ne ::= e e e | e e | "a" | "aa"'
    await attacker.flood(2, lambda number: held({"grammar": rules.format(number)}))


async def hidden_regex(attacker: Attacker) -> None:
    """The same regular expression, behind 600 cheap characters, in one of two branches."""
    held = await _staying(attacker)
    await attacker.flood(2, lambda number: held({"regex": f"x{{{600 + number}}}{_EXPENSIVE}b|[b-w]{{900}}"}))


async def _staying(attacker: Attacker) -> Callable[[dict[str, str]], object]:
    """A way to make requests whose answers are held to something, and stay at `x` and `a` for as long as they may."""
    async with attacker.client() as client:
        answers = [await client.post("/tokenize", json={"prompt": one, "add_special_tokens": False}) for one in "xa"]
    bias = {str(answer.json()["tokens"][-1]): 100 for answer in answers}

    def held(outputs: dict[str, str]) -> object:
        return chat(text("a"), structured_outputs=outputs, max_tokens=1_500, logit_bias=bias, temperature=1.0)

    return held


async def refused_schema(attacker: Attacker) -> None:
    """A schema that compiles without xgrammar's cache and fails with it, which the engine has."""
    content: dict[str, object] = {"type": "string", "pattern": "^(a|aa){0,200}$"}
    await attacker.flood(2, lambda _: chat(text("a"), response_format=schema(content)))


async def failing_streams(attacker: Attacker) -> None:
    """Streams whose last allowed token is excluded, so that the engine ends them with an error after the first ones."""
    async with attacker.client() as client:
        answer = await client.post("/tokenize", json={"prompt": "a", "add_special_tokens": False})
    allowed = answer.json()["tokens"][-1:]
    fields = {"structured_outputs": {"regex": "aaab"}, "allowed_token_ids": allowed, "stream": True}
    await attacker.flood(4, lambda number: chat(text(f"{number}"), **fields))


async def enlarged(attacker: Attacker) -> None:
    """Three images of 64 × 64, each to be enlarged to 178.9 million pixels: 1 KB."""

    def body(number: int) -> object:
        images = [image(3 * number + index, 64) for index in range(3)]
        return chat(*images, text("?"), mm_processor_kwargs={"min_pixels": 178_900_000, "max_pixels": 178_900_000})

    await attacker.flood(4, body)


async def expensive_images(attacker: Attacker) -> None:
    """Images of 13,000 × 13,000 in 21 KB, each with a text chunk of its own, so that none is cached; six at a time."""
    file = io.BytesIO()
    Image.new("1", (13_000, 13_000)).save(file, "PNG")
    start, rest = file.getvalue()[:33], file.getvalue()[33:]  # after the signature and IHDR

    def body(_: int) -> object:
        chunk = b"tEXt" + b"Comment\0" + secrets.token_hex(8).encode()
        framed = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
        return chat({"type": "image_url", "image_url": {"url": png_url(start + framed + rest)}}, text("?"))

    await attacker.flood(6, body)


async def slow_downloads(attacker: Attacker) -> None:
    """Two files that together fill the budget, read at 64 bytes in 5 s over 48 connections: the large one first."""
    large = 63 * MIB
    sizes = (large, BUDGET_BYTES - 4 * large - 256)
    ids = []
    async with httpx.AsyncClient(base_url=attacker.url, timeout=60) as client:
        for size in sizes:
            reply = await client.post(
                FILES,
                files={"file": ("f.bin", secrets.token_bytes(size))},
                data={"purpose": "vision"},
                headers={"Authorization": f"Bearer {attacker.key}"},
            )
            ids.append(reply.json()["id"])

    async def one(name: str) -> None:
        while True:
            with contextlib.suppress(OSError):
                async with attacker.connection() as (reader, writer):
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
                    writer.write(attacker.head("GET", f"{FILES}/{name}/content"))
                    taken = await attacker.status(reader) == "200"
                    while taken and await reader.read(64):  # noqa: ASYNC110 (it is the client that is slow)
                        await asyncio.sleep(5)
            await asyncio.sleep(0.2)

    async with asyncio.TaskGroup() as group:
        for name in ids:
            for _ in range(24):
                group.create_task(one(name))
            await asyncio.sleep(2)
        attacker.begun.set()


async def unknown_files(attacker: Attacker) -> None:
    """150 chats at a time, each with 64 files that nobody has."""

    def body(_: int) -> object:
        ids = [f"file-{secrets.token_hex(32)}" for _ in range(64)]
        return chat(*({"type": "file", "file": {"file_id": name}} for name in ids), text("?"))

    await attacker.flood(150, body)


async def compressed(attacker: Attacker) -> None:
    """700 bodies that are said to be compressed, of 255,000 bytes each, whose last byte never comes."""
    attacker.begun.set()
    data = secrets.token_bytes(255_000)
    fields = ("Content-Type: application/json", "Content-Encoding: gzip", f"Content-Length: {len(data) + 1}")

    async def one() -> None:
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                async with attacker.connection() as (reader, writer):
                    writer.write(attacker.head("POST", CHAT, *fields))
                    for start in range(0, len(data), 16_384):
                        writer.write(data[start : start + 16_384])
                        await writer.drain()
                    async with asyncio.timeout(60):
                        await attacker.status(reader)
            await asyncio.sleep(1)

    await asyncio.gather(*(one() for _ in range(700)))


async def aborts(attacker: Attacker) -> None:
    """Small requests of six kinds whose connections are closed within 100 ms, 60 at a time."""
    attacker.begun.set()
    bodies = (
        (CHAT, chat(text("a"))),
        (CHAT, chat(text("a"), stream=True, max_tokens=512)),
        (CHAT, chat(image(1), text("a"))),
        ("/v1/completions", {"prompt": "a", "max_tokens": 64}),
        ("/tokenize", {"prompt": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 16, "model": "m"}),
    )

    async def one(number: int) -> None:
        while True:
            path, body = bodies[number % len(bodies)]
            data = json.dumps(body).encode()
            with contextlib.suppress(OSError):
                async with attacker.connection() as (_, writer):
                    fields = ("Content-Type: application/json", f"Content-Length: {len(data)}")
                    writer.write(attacker.head("POST", path, *fields) + data)
                    await asyncio.sleep(random.uniform(0.0, 0.1))
                    attacker.answers["aborted"] += 1
            number += 1

    await asyncio.gather(*(one(number) for number in range(60)))


async def strangers(attacker: Attacker) -> None:
    """100 requests a second without a valid key, and 100 with one: each is a line of the log."""
    attacker.begun.set()

    async def ask(key: str) -> None:
        async with attacker.connection() as (reader, writer):
            while True:
                writer.write(attacker.head("GET", "/v1/models", key=key))
                await attacker.status(reader)
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(re.search(rb"(?i)content-length: (\d+)", head)[1]))  # type: ignore[index]
                await asyncio.sleep(0.1)

    await asyncio.gather(*(ask(key) for key in ("no-key-of-anybody", attacker.key) for _ in range(10)))


async def nothing(_: Attacker) -> None:
    """Send nothing: the fault is on the server's own machine."""
