"""S1 to S26 against semel and bare vLLM: `python -m tools.security.scoreboard [--write]` tries and prints a table.

Both serve a tiny model under the same flags and with an API key, and may fetch images from one server of ours. Each
attempt is one or a few requests from outside; what the server did stands in the table, in the words of what was seen:
statuses, growth of the HTTP process, whether a server inside the network was reached, whether it still answers. Rows
that nobody can try from outside name the test that shows what semel does.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
from PIL import Image

from semel.lab.bench.ports import free_port
from semel.lab.testing.models import build
from tools.security.attacker import CHAT, KEYS, MIB, chat, image, text
from tools.security.target import Against, Target, running

__all__ = ["ATTEMPTS", "INSIDE_ONLY", "Upstream", "page_of"]

PAGE: Final = Path(__file__).parents[2] / "docs" / "security" / "threats.md"
ALIVE_S: Final = 180.0
KEY: Final = KEYS["mallory"]
BEGIN, END = "<!-- begin scoreboard -->\n", "<!-- end scoreboard -->\n"
OPEN_ROUTES: Final = (
    *("/metrics", "/v1/models", "/docs", "/openapi.json", "/version", "/server_info", "/load"),
    *("/tokenizer_info", "/ping", "/v1/files"),
)


@dataclass
class Upstream:
    """A server that images may be fetched from, and one inside the network that nobody should reach."""

    url: str = ""
    inside: str = ""
    reached: int = 0
    """How often the one inside was asked."""

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Both, as long as the block runs."""
        ports = free_port(), free_port()
        self.url, self.inside = f"http://127.0.0.1:{ports[0]}", f"http://localhost:{ports[1]}"
        async with (
            await asyncio.start_server(self._answer, "127.0.0.1", ports[0]),
            await asyncio.start_server(self._answer_inside, "127.0.0.1", ports[1]),
        ):
            yield

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            path = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1]
            if path.startswith(b"/redirect"):
                writer.write(f"HTTP/1.1 302 Found\r\nLocation: {self.inside}/secret.png\r\n\r\n".encode())
            elif path.startswith(b"/endless"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n")
                until = time.monotonic() + 30
                while time.monotonic() < until:
                    writer.write(b"\x89PNG" + bytes(MIB))
                    await writer.drain()
            await writer.drain()
        writer.close()

    async def _answer_inside(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reached += 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            data = base64.b64decode(image(3)["image_url"]["url"].partition(",")[2])
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
            await writer.drain()
        writer.close()


@dataclass
class Trial:
    """One server under one attempt."""

    target: Target
    upstream: Upstream
    client: httpx.AsyncClient
    before: int = field(default=0)

    async def ask(self, body: object, path: str = CHAT) -> tuple[str, httpx.Response | None, float]:
        """Return the status of an answer, or what happened instead, and how long it took."""
        began = time.monotonic()
        try:
            reply = await self.client.post(path, json=body)
        except httpx.HTTPError as error:
            return type(error).__name__, None, time.monotonic() - began
        return str(reply.status_code), reply, time.monotonic() - began

    def rss(self) -> int:
        with contextlib.suppress(psutil.Error, StopIteration):
            return int(self.target.http_process().memory_info().rss)
        return 0

    async def is_alive(self, within_s: float = ALIVE_S) -> float | None:
        """After how long a chat is answered; None if none is."""
        began = time.monotonic()
        while time.monotonic() - began < within_s:
            status, _, _ = await self.ask(chat(text("Are you there?")))
            if status == "200":
                return time.monotonic() - began
            await asyncio.sleep(0.5)
        return None


Attempt = Callable[[Trial], Awaitable[str]]


async def _inside(trial: Trial, url: str) -> str:
    before = trial.upstream.reached
    status, _, _ = await trial.ask(chat({"type": "image_url", "image_url": {"url": url}}, text("?")))
    reached = trial.upstream.reached - before
    return f"**the server inside was reached**, {status}" if reached else f"not reached, {status}"


async def forged(trial: Trial) -> str:
    return await _inside(trial, f"{trial.upstream.inside}/secret.png")


async def redirected(trial: Trial) -> str:
    return await _inside(trial, f"{trial.upstream.url}/redirect.png")


async def endless(trial: Trial) -> str:
    before, largest = trial.rss(), 0

    async def watch() -> None:
        nonlocal largest
        while True:
            largest = max(largest, trial.rss())
            await asyncio.sleep(0.1)

    watching = asyncio.create_task(watch())
    url = f"{trial.upstream.url}/endless.png"
    status, _, took_s = await trial.ask(chat({"type": "image_url", "image_url": {"url": url}}, text("?")))
    watching.cancel()
    return f"{status} after {took_s:.1f} s, the HTTP process grew by {max(0, largest - before) / MIB:.0f} MiB"


async def bomb(trial: Trial) -> str:
    file = io.BytesIO()
    Image.new("1", (13_000, 13_000)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    before = trial.rss()
    status, _, took_s = await trial.ask(chat({"type": "image_url", "image_url": {"url": url}}, text("?")))
    grown = max(0, trial.rss() - before) / MIB
    return (
        f"{len(file.getvalue()) / 1e3:.0f} KB: {status} after {took_s:.1f} s, the HTTP process grew by {grown:.0f} MiB"
    )


async def revealing(trial: Trial) -> str:
    url = f"data:image/png;base64,{base64.b64encode(b'no image at all').decode()}"
    status, reply, _ = await trial.ask(chat({"type": "image_url", "image_url": {"url": url}}, text("?")))
    words = "" if reply is None else str(reply.json().get("error", reply.json()))
    leaks = [word for word in ("0x", "_io.", "PIL", "Traceback", "site-packages") if word in words]
    return (
        f"{status}; the text names {', '.join(f'`{one}`' for one in leaks)}" if leaks else f"{status}; nothing inside"
    )


async def degenerate(trial: Trial) -> str:
    seen = []
    for width, height in ((1, 1), (1, 4_000), (4_000, 1)):
        file = io.BytesIO()
        Image.new("RGB", (width, height)).save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        status, _, _ = await trial.ask(chat({"type": "image_url", "image_url": {"url": url}}, text("?")))
        seen.append(f"{width}×{height}: {status}")
    return ", ".join(seen)


async def typed(trial: Trial) -> str:
    marks = "<|vision_start|><|image_pad|><|vision_end|>"
    status, reply, _ = await trial.ask(chat(text(f"{marks * 3} what is this?"), return_token_ids=True))
    if reply is None or status != "200":
        return status
    ids = reply.json().get("prompt_token_ids") or []
    plain = (await trial.ask(chat(text("what is this?"), return_token_ids=True)))[1]
    count = len(ids) - len((plain.json().get("prompt_token_ids") or []) if plain is not None else [])
    words = "became 9 special tokens" if count < 15 else f"became {count} tokens of text"
    return f"{status}; what was typed {words}"


async def parameters(trial: Trial) -> str:
    fields: dict[str, Any] = {
        "`n` 10⁹": {"n": 10**9},
        "`top_logprobs` 10⁶": {"logprobs": True, "top_logprobs": 10**6},
        "10⁵ stops": {"stop": [f"s{number}" for number in range(100_000)]},
        "10⁵ biases": {"logit_bias": {str(number): 1 for number in range(100_000)}},
    }
    seen = []
    for name, more in fields.items():
        status, _, took_s = await trial.ask(chat(text("?"), **more))
        seen.append(f"{name}: {status}" + (f" after {took_s:.1f} s" if took_s > 1 else ""))
    return ", ".join(seen)


async def _gap(trial: Trial, work: Awaitable[Any]) -> tuple[Any, float]:
    """Return what comes of work, and the longest time that the probe took meanwhile."""
    longest = 0.0

    async def probe() -> None:
        nonlocal longest
        async with httpx.AsyncClient(base_url=trial.target.url, timeout=60) as client:
            while True:
                began = time.monotonic()
                with contextlib.suppress(httpx.HTTPError):
                    await client.get(trial.target.probe)
                longest = max(longest, time.monotonic() - began)
                await asyncio.sleep(0.02)

    probing = asyncio.create_task(probe())
    try:
        return await work, longest
    finally:
        await asyncio.sleep(0.1)
        probing.cancel()


async def many_items(trial: Trial) -> str:
    parts = [image(number % 9) for number in range(5_000)]
    (status, _, took_s), gap = await _gap(trial, trial.ask(chat(*parts, text("?"))))
    return f"{status} after {took_s:.1f} s; a probe waited {gap:.2f} s"


async def without_key(trial: Trial) -> str:
    answering = []
    async with httpx.AsyncClient(base_url=trial.target.url, timeout=10) as client:
        for route in OPEN_ROUTES:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(route)).status_code == 200:
                    answering.append(f"`{route}`")
    return f"answered without a key: {', '.join(answering)}" if answering else "nothing is answered without a key"


async def long_head(trial: Trial) -> str:
    before, largest = trial.rss(), 0
    reader, writer = await asyncio.open_connection("127.0.0.1", int(trial.target.url.rpartition(":")[2]))
    status = "cut off"
    with contextlib.suppress(OSError, TimeoutError):
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: h\r\n")
        for number in range(64):
            writer.write(b"X-%d: " % number + b"a" * MIB + b"\r\n")
            await writer.drain()
            largest = max(largest, trial.rss())
        async with asyncio.timeout(5):
            status = (await reader.readline()).split(b" ")[1].decode()
    writer.transport.abort()
    return f"64 MB: {status}, the HTTP process grew by {max(0, largest - before) / MIB:.0f} MiB"


async def grammar(trial: Trial) -> str:
    properties = {f"p{index}": {"type": "string", "maxLength": 64} for index in range(1_800)}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object", "properties": properties}}}
    (status, _, took_s), gap = await _gap(trial, trial.ask(chat(text("?"), response_format=form)))
    return f"{status} after {took_s:.1f} s; a probe waited {gap:.2f} s"


async def sequences(trial: Trial) -> str:
    body = {"prompt": ["a"] * 256, "n": 128, "max_tokens": 512, "ignore_eos": True}
    asking = asyncio.create_task(trial.ask(body, "/v1/completions"))
    await asyncio.sleep(1)
    began = time.monotonic()
    async with httpx.AsyncClient(base_url=trial.target.url, headers=_head(KEYS["alice"]), timeout=20) as other:
        try:
            status = str((await other.post(CHAT, json=chat(text("Hello")))).status_code)
        except httpx.HTTPError:
            status = "no answer within 20 s"
    other_s = time.monotonic() - began
    done = f"{(await asking)[0]} at once" if asking.done() else "running"
    asking.cancel()
    return f"32,768 sequences: {done}; another's chat: {status} ({other_s:.1f} s)"


async def dead_engine(trial: Trial) -> str:
    trial.target.engine_core().kill()
    alive_s = await trial.is_alive()
    return "**never answered again**" if alive_s is None else f"answered again after {alive_s:.0f} s"


async def idle_connections(trial: Trial) -> str:
    port = int(trial.target.url.rpartition(":")[2])
    connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    try:
        for _ in range(400):
            with contextlib.suppress(OSError):
                connections.append(await asyncio.open_connection("127.0.0.1", port))
        await asyncio.sleep(15)
        closed = sum(reader.at_eof() for reader, _ in connections)
        began = time.monotonic()
        async with httpx.AsyncClient(base_url=trial.target.url, timeout=30) as client:
            status = (await client.get(trial.target.probe)).status_code
        return f"400 silent ones: probe {status} in {time.monotonic() - began:.2f} s; after 15 s {closed} were closed"
    finally:
        for _, writer in connections:
            writer.transport.abort()


ATTEMPTS: Final[dict[str, tuple[str, Attempt]]] = {
    "S1": ("an image URL that leads into the network", forged),
    "S3": ("an allowed URL that redirects into the network", redirected),
    "S4": ("an image without an end", endless),
    "S5": ("a PNG of 13,000 × 13,000 pixels", bomb),
    "S7": ("a file that is no image: what does the error tell?", revealing),
    "S8": ("images of one pixel's width", degenerate),
    "S14": ("special tokens typed as text", typed),
    "S15": ("numbers and lists without measure", parameters),
    "S16": ("5,000 images in one request", many_items),
    "S17": ("routes without a key", without_key),
    "S19": ("a request head of 64 MB", long_head),
    "S20": ("a schema of 91 KB", grammar),
    "S21": ("256 prompts with `n` 128, and another tenant's chat", sequences),
    "S25": ("400 connections that say nothing", idle_connections),
    "S22": ("the engine core is killed", dead_engine),
}
"""By row, in the order in which they are tried; the last one kills."""

INSIDE_ONLY: Final[dict[str, str]] = {
    "S2": "two parsers of a URL",
    "S6": "memory faults in decoders",
    "S9": "features of the wrong shape",
    "S10": "deserialisation",
    "S11": "items that pass for other items",
    "S12": "another tenant's items",
    "S13": "a model that sees what a moderator does not",
    "S18": "one request that starves the others",
    "S23": "a decoder that is taken over",
    "S24": "upstream responses as a weapon",
    "S26": "stored encoder outputs",
}
"""What cannot be tried from outside, or has a table of its own."""


def _head(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def tried(kind: Against, model: Path, only: list[str]) -> dict[str, str]:
    """Return what one server did, by row."""
    upstream, seen = Upstream(), {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        async with upstream.serving():
            keys = ("--api-key", *KEYS.values()) if kind == "vllm" else ()
            flags = ("--max-num-seqs", "64", *keys)
            with contextlib.ExitStack() as stack:
                server = running(kind, model, Path(home), upstream.url, flags=flags)
                target = await asyncio.to_thread(stack.enter_context, server)
                async with httpx.AsyncClient(base_url=target.url, headers=_head(KEY), timeout=60) as client:
                    trial = Trial(target, upstream, client)
                    for row, (_, attempt) in ATTEMPTS.items():
                        if not only or row in only:
                            seen[row] = await _one(trial, attempt, row)
    return seen


async def _one(trial: Trial, attempt: Attempt, row: str) -> str:
    try:
        async with asyncio.timeout(300):
            what = await attempt(trial)
    except Exception as error:  # noqa: BLE001 - what went wrong is a cell of the table
        what = f"the attempt failed: {type(error).__name__}"
    if row != "S22" and await trial.is_alive(60) is None:
        what += "; **no chat is answered any more**"
    sys.stderr.write(f"{trial.target.kind} {row}: {what}\n")
    return what


def page_of(page: str, rows: dict[str, dict[str, str]]) -> str:
    """Return the page with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, behind = rest.partition(END)
    return before + BEGIN + "\n".join(_lines(rows)) + "\n" + END + behind


def _lines(rows: dict[str, dict[str, str]]) -> list[str]:
    lines = ["| | attack | semel | bare vLLM |", "|---|---|---|---|"]
    for number in range(1, 27):
        row = f"S{number}"
        if row in ATTEMPTS:
            semel, vllm = (rows.get(kind, {}).get(row, "not tried") for kind in ("semel", "vllm"))
            lines.append(f"| {row} | {ATTEMPTS[row][0]} | {semel} | {vllm} |")
        else:
            lines.append(f"| {row} | {INSIDE_ONLY[row]} | [shown by its tests](#security) | not tried from outside |")
    return lines


async def main(options: argparse.Namespace) -> None:
    """Try everything on both."""
    rows: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = build("qwen2-vl", Path(folder) / "model")
        for kind in options.against:
            rows[kind] = await tried(kind, model, options.only)
    sys.stdout.write("\n".join(_lines(rows)) + "\n")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    if options.write:
        PAGE.write_text(page_of(PAGE.read_text(), rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="Rows, as S5.")
    parser.add_argument("--against", nargs="*", default=["semel", "vllm"], choices=["semel", "vllm"])
    parser.add_argument("--json", type=Path, help="a file for what was seen")
    parser.add_argument("--write", action="store_true", help="write the table into docs/security/threats.md")
    asyncio.run(main(parser.parse_args()))
