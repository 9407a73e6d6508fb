"""Attacks of clients that are mostly within their rights, each in a process of its own.

`python -m tools.security.attacks NAME URL KEY UPSTREAM` sends until standard input is closed. Then it prints how often
it got each status, and the CPU time that it took; `attack` measures the rest. Those of the security review are in
`review_attacks`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import sys
import time
from typing import Final

from semel.lab.testing.pdf import page_of, pdf
from tools.security import review_attacks as review
from tools.security.attacker import BUDGET_BYTES, CHAT, EMBEDDINGS, MIB, Attack, Attacker, chat, image, schema, text

__all__ = ["ATTACKS"]


async def heads(attacker: Attacker) -> None:
    """Heads of 48 MB, on 8 connections."""
    attacker.begun.set()

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


async def schemas(attacker: Attacker) -> None:
    """Forty different schemas of 91 KB at a time."""

    def body(number: int) -> object:
        properties = {f"p{number}_{index}": {"type": "string", "maxLength": 64} for index in range(1_800)}
        content = {"type": "object", "properties": properties, "required": sorted(properties)[:100]}
        return chat(text("?"), response_format=schema(content))

    await attacker.flood(40, body)


async def small_schemas(attacker: Attacker) -> None:
    """The same, as large as they may be."""

    def body(number: int) -> object:
        properties = {f"p{number}_{index}": {"type": "string", "maxLength": 64} for index in range(250)}
        return chat(text("?"), response_format=schema({"type": "object", "properties": properties}))

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
    attacker.begun.set()

    async def one(size: int) -> None:
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                async with attacker.connection() as (reader, writer):
                    fields = ("Content-Type: application/json", f"Content-Length: {size}")
                    writer.write(attacker.head("POST", CHAT, *fields))
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
    body = json.dumps(chat(*(image(number, 1_024) for number in range(999)), text("?"))).encode()
    await attacker.flood(2, lambda _: body)


async def long_texts(attacker: Attacker) -> None:
    """Texts of 8 MB that cannot fit into any prompt."""
    words = "wort " * 1_600_000
    await attacker.flood(8, lambda number: chat(text(f"{number} {words}")))


async def documents(attacker: Attacker) -> None:
    """Eight new documents of 200 pages at a time; their prompts fit."""
    data = pdf([page_of(page) for page in range(200)])

    def body(number: int) -> object:
        url = "data:application/pdf;base64," + base64.b64encode(data + b"%%%d" % number).decode()
        return chat({"type": "file", "file": {"file_data": url, "dpi": 36}}, text("?"))

    await attacker.flood(8, body)


async def embeddings(attacker: Attacker) -> None:
    """10,000 embeddings of 60 words at a time, in five requests."""
    words = "wort " * 60
    texts = [f"{index} {words}" for index in range(2_000)]
    await attacker.flood(5, lambda number: {"input": [f"{number} {one}" for one in texts]}, EMBEDDINGS)


async def single_embeddings(attacker: Attacker) -> None:
    """The same texts, one a request, on 200 connections."""
    words = "wort " * 60
    await attacker.flood(200, lambda number: {"input": f"{number} {words}"}, EMBEDDINGS)


ATTACKS: Final[dict[str, Attack]] = {
    "heads of 48 MB": heads,
    "3 small images, `min_pixels` 178.9 M": review.enlarged,
    "images of 13,000 × 13,000": review.expensive_images,
    "40 schemas of 91 KB": schemas,
    "40 schemas of 15 KB": small_schemas,
    "regex, expensive to follow": review.expensive_regex,
    "grammar `e e e`": review.expensive_grammar,
    "regex, hidden branches": review.hidden_regex,
    "a schema that the engine refuses": review.refused_schema,
    "256 × 128 sequences": sequences,
    "256 sequences, 4 times": allowed_sequences,
    "9 × 28 sequences, 4 times": many_sequences,
    "streams that fail on order": review.failing_streams,
    "4 stalled bodies, and small ones": stalled,
    "700 compressed bodies": review.compressed,
    "slow downloads": review.slow_downloads,
    "unknown files, slow bucket": review.unknown_files,
    "aborted requests": review.aborts,
    "supervisor stopped, strangers": review.strangers,
    "a trial killed": review.nothing,
    "8,000 spaces in `Cache-Control`": spaces,
    "150 one-byte answers": tiny_answers,
    "999 images that cannot fit": too_many_images,
    "8 texts of 8 MB": long_texts,
    "8 documents of 200 pages": documents,
    "10,000 embeddings, 2,000 a request": embeddings,
    "embeddings on 200 connections": single_embeddings,
}


async def main(name: str, attacker: Attacker) -> None:
    """Attack until standard input is closed. A line says when that has begun."""
    attacking = asyncio.create_task(_attacking(ATTACKS[name], attacker))
    await attacker.begun.wait()
    print("begun", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    attacking.cancel()
    await asyncio.gather(attacking, return_exceptions=True)
    print(json.dumps({"answers": attacker.answers, "cpu_s": time.process_time()}))


async def _attacking(attack: Attack, attacker: Attacker) -> None:
    try:
        await attack(attacker)
    except Exception as error:  # noqa: BLE001 (an edge: what an attacker meets is a result)
        attacker.answers[type(error).__name__] += 1
    finally:
        attacker.begun.set()


if __name__ == "__main__":
    _, name, url, key, upstream = sys.argv
    asyncio.run(main(name, Attacker(url, key, upstream)))
