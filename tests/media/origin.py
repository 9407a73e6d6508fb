"""A web server on loopback that says what a test wants it to say, byte by byte, and a fetcher that may reach it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from semel.core import Tenant
from semel.media.fetch.connector import Lookup
from semel.media.fetch.download import FetchLimits
from semel.media.fetch.fetch import Fetcher, FetchOptions
from semel.media.fetch.policy import MediaPolicy
from semel.media.fetch.url import Url, parse_url

TLS = Path(__file__).parent / "tls"
TENANT = Tenant("alice")
LIMITS = FetchLimits(max_bytes=1 << 16, total_s=10.0, connect_s=2.0, idle_s=2.0)


@dataclass(frozen=True)
class Seen:
    """A request as it came."""

    target: str
    headers: dict[str, str]


Answer = Callable[[Seen, asyncio.StreamWriter], Awaitable[None]]


def reply(body: bytes = b"", status: int = 200, **headers: str) -> Answer:
    """A whole and honest response; `max_age` is written as `Max-Age`, and so on."""

    async def answer(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(head(status, content_length=str(len(body)), **headers) + body)

    return answer


def head(status: int = 200, **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} Whatever"]
    lines += [f"{name.replace('_', '-').title()}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


@dataclass
class Origin:
    """A server, and what it has been asked."""

    host: str
    port: int = 0
    scheme: str = "http"
    answers: dict[str, Answer] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    connections: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __setitem__(self, path: str, answer: Answer | bytes) -> None:
        self.answers[path] = reply(answer) if isinstance(answer, bytes) else answer

    def url(self, target: str = "/", host: str | None = None) -> str:
        return f"{self.scheme}://{host or self.host}:{self.port}{target}"

    @property
    def targets(self) -> list[str]:
        return [one.target for one in self.seen]

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until something that the server sees has come true."""
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(true)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._move(1)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                fields = (line.partition(":") for line in lines[1:] if line)
                seen = Seen(lines[0].split(" ")[1], {name.lower(): value.strip() for name, _, value in fields})
                self.seen.append(seen)
                await self._move(0)
                answer = self.answers.get(seen.target.partition("?")[0], reply(b"nothing here", 404))
                await answer(seen, writer)
                await writer.drain()
                if writer.is_closing():
                    break
        writer.close()
        await self._move(-1)

    async def _move(self, connections: int) -> None:
        self.connections += connections
        async with self.changed:
            self.changed.notify_all()


@asynccontextmanager
async def origin(host: str = "127.0.0.1", *, tls: bool = False) -> AsyncIterator[Origin]:
    """A server at a free port; over TLS its certificate is for cat.example and 127.0.0.1."""
    made = Origin(host, scheme="https" if tls else "http")
    context = None
    if tls:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(TLS / "certificate.pem", TLS / "key.pem")
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await made._serve(reader, writer)
        except asyncio.CancelledError:
            writer.close()
        finally:
            tasks.discard(task)

    server = await asyncio.start_server(serve, host, 0, ssl=context)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def trusting() -> ssl.SSLContext:
    """What a client needs to believe the server."""
    return ssl.create_default_context(cafile=str(TLS / "certificate.pem"))


class Names:
    """A resolver: the addresses of each name, one list after the other; the last one stays."""

    def __init__(self, **names: Sequence[Sequence[str]]) -> None:
        self._answers = {name.replace("_", "."): list(answers) for name, answers in names.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str) -> Sequence[str]:
        self.asked.append(host)
        answers = self._answers.get(host)
        if not answers:
            raise OSError("no such name")
        return answers.pop(0) if len(answers) > 1 else answers[0]


@asynccontextmanager
async def fetcher(
    *domains: str,
    networks: Sequence[str] = ("127.0.0.1/32",),
    allow_http: bool = True,
    local_path: Path | None = None,
    limits: FetchLimits = LIMITS,
    cache_bytes: int = 0,
    lookup: Lookup | None = None,
    **rest: Any,
) -> AsyncIterator[Fetcher]:
    """A fetcher under a policy as an operator writes it."""
    policy = MediaPolicy.of(domains=domains, allow_http=allow_http, networks=networks, local_path=local_path)
    made = Fetcher(FetchOptions(policy, limits, cache_bytes), lookup=lookup or Names(), **rest)
    try:
        yield made
    finally:
        await made.close()


def reaching(server: Origin, **options: Any) -> contextlib.AbstractAsyncContextManager[Fetcher]:
    """A fetcher that may reach a server by its address, and nothing else."""
    return fetcher(f"{server.host}:{server.port}", **options)


async def get(fetching: Fetcher, url: str | Url, tenant: Tenant = TENANT, **options: Any) -> bytes:
    """Fetch, with a deadline."""
    async with asyncio.timeout(20):
        return await fetching.fetch(parse_url(url) if isinstance(url, str) else url, tenant, **options)
