"""The requests of a batch: so many in flight, each until it is answered or given up.

What is temporary (429, 502, 503, a connection that breaks) is tried again for a while. What then is still refused, and
what is wrong with a line, is the line's result. If the server is not there or not ready, the batch ends without a
result for those lines: the next run sends them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mimetypes
import random
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Final

import httpx
import msgspec

import semel.openai.transport
from semel.aio import concurrently
from semel.batch.lines import BatchFile, BatchRequest, Line, replaced_urls
from semel.batch.results import Results
from semel.batch.schedule import Schedule
from semel.batch.settings import BatchSettings
from semel.errors import ConfigError, InvalidRequest, NotReady, RequestError
from semel.openai.memory import Memory
from semel.telemetry import metrics
from semel.telemetry.scrape import Scrape

__all__ = ["BatchProgress", "run_batch"]

_WINDOW: Final = 2_048
"""Lines that are looked ahead for those that share items."""

_READ: Final = 64
"""Lines that are read at a time."""

_RETRIED: Final = frozenset({429, 502, 503})
_MIN_PAUSE_S: Final = 0.5
_MAX_PAUSE_S: Final = 30.0
_TIMEOUT: Final = httpx.Timeout(600, connect=10)
_WATCH_S: Final = 1.0
_MAX_FILE_BYTES: Final = 1 << 30
_JSON: Final = {"content-type": "application/json"}


@dataclass(slots=True)
class BatchProgress:
    """The state of a batch, for its reader."""

    done: int
    failed: int
    total: int | None = None
    """None until the lines are counted."""

    seconds: float = 0.0
    answered: int = 0
    """By this run."""

    hits: float | None = None
    """The part of all items that the server knew; None if it shows no metrics."""

    trouble: str | None = None
    """The last answer, if it is tried again: its status, or the name of its connection's error."""

    @property
    def figures(self) -> str:
        """The rate, the remaining time, the hits and what goes wrong, in words."""
        rate = self.answered / self.seconds if self.seconds else 0.0
        words = [f"{rate:.1f} lines/s"]
        if self.total is not None and rate:
            minutes, seconds = divmod(round((self.total - self.done) / rate), 60)
            words.append(f"{minutes // 60}:{minutes % 60:02}:{seconds:02} left")
        if self.hits is not None:
            words.append(f"{self.hits:.0%} of items cached")
        words += [f"{self.failed:,} errors"] if self.failed else []
        words += [f"trying again after {self.trouble}"] if self.trouble else []
        return ", ".join(words)


async def run_batch(
    settings: BatchSettings, url: str, key: str | None, show: Callable[[BatchProgress], object]
) -> BatchProgress:
    """Send all lines that have no result yet to the server at `url`, and write their results."""
    with (
        contextlib.closing(BatchFile.open(settings.input)) as file,
        contextlib.closing(Results.open(settings.output, drop_errors=settings.retry_errors)) as results,
    ):
        batch = _Batch(settings, url, _clients(key), file, results)
        await batch.run(show)
        return batch.progress()


def _clients(key: str | None) -> Callable[[], httpx.AsyncClient]:
    """Return what makes a client for one connection; all of them know what any has sent.

    A client looks at each of its connections with each request: one of 32 took 2 ms of CPU longer for a line.
    """
    return partial(
        semel.openai.transport.async_client,
        memory=Memory(),
        timeout=_TIMEOUT,
        headers={"authorization": f"Bearer {key}"} if key else None,
        verify=httpx.create_ssl_context(),
    )


class _Batch:
    def __init__(
        self,
        settings: BatchSettings,
        url: str,
        clients: Callable[[], httpx.AsyncClient],
        file: BatchFile,
        results: Results,
    ) -> None:
        self._settings = settings
        self._url = url.rstrip("/").removesuffix("/v1")
        self._clients = clients
        self._file = file
        self._results = results
        self._schedule = Schedule()
        self._reading = asyncio.Lock()
        self._is_read = False
        """Whether the whole file is in the schedule, or was."""

        self._began = time.monotonic()
        self._answered = 0
        self._total: int | None = None
        self._hits: float | None = None
        self._trouble: str | None = None
        self._read_file = _file_reader(settings)

    async def run(self, show: Callable[[BatchProgress], object]) -> None:
        """Send all lines."""
        places = self._settings.concurrency
        watches = [asyncio.create_task(self._watch(show)), asyncio.create_task(self._watch_hits())]
        try:
            await concurrently(range(places), lambda _: self._send_lines(), at_once=places)
        finally:
            for one in watches:
                one.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    def progress(self) -> BatchProgress:
        """Return how far it is."""
        spent_s = time.monotonic() - self._began
        return BatchProgress(
            self._results.count, self._results.failed, self._total, spent_s, self._answered, self._hits, self._trouble
        )

    async def _send_lines(self) -> None:
        async with self._clients() as client:
            while (line := await self._next()) is not None:
                await self._send_line(client, line)
                self._schedule.done(line)
                self._answered += 1

    async def _next(self) -> Line | None:
        while not self._is_read and len(self._schedule) < _WINDOW:
            async with self._reading:
                if self._is_read or len(self._schedule) >= _WINDOW:
                    break
                for read in await asyncio.to_thread(self._file.read, _READ, self._results.has):
                    self._schedule.add(read)
                self._is_read = self._file.is_at_end
            if (line := self._schedule.take()) is not None:
                return line
        return self._schedule.take()

    async def _send_line(self, client: httpx.AsyncClient, line: Line) -> None:
        """Send a line, and write its result."""
        data, custom_id = self._file.load(line), None
        try:
            request = BatchRequest.parse(data)
            custom_id = request.custom_id
            content = await self._content(request)
        except RequestError as error:
            custom_id = custom_id or _custom_id(data)
            self._results.put(line, custom_id, None, {"code": error.code, "message": str(error)})
            return
        try:
            response = await self._post(client, f"{self._url}{request.url}", content)
        except httpx.RequestError as error:
            self._results.put(line, custom_id, None, {"code": "no_answer", "message": repr(error)})
            return
        if response.status_code == HTTPStatus.UNAUTHORIZED:
            raise ConfigError(f"{self._url} wants another API key: set --api-key, VLLM_API_KEY or OPENAI_API_KEY")
        name = response.headers.get("x-request-id", "")
        found = {"status_code": response.status_code, "request_id": name, "body": _body(response)}
        self._results.put(line, custom_id, found)

    async def _content(self, request: BatchRequest) -> bytes:
        """Return the body to send: that of the line, with the bytes of files in the place of their URLs."""
        if self._read_file is None or b"file:" not in bytes(request.body).lower():
            return bytes(request.body)
        urls: dict[str, str] = {}
        try:
            body = msgspec.json.decode(request.body)
            replaced_urls(body, lambda url: urls.setdefault(url, ""))
            for one in urls:
                urls[one] = await self._read_file(one)
            body = replaced_urls(body, urls.__getitem__)
            return json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except RecursionError:
            raise InvalidRequest("the body is nested too deeply for the URLs of files in it to be replaced") from None

    async def _post(self, client: httpx.AsyncClient, url: str, content: bytes) -> httpx.Response:
        """Send a request until it is answered or given up; the last error of its connection is raised."""
        began = time.monotonic()
        pause_s = _MIN_PAUSE_S
        while True:
            failed: httpx.RequestError | None = None
            response: httpx.Response | None = None
            try:
                response = await client.post(url, content=content, headers=_JSON)
            except httpx.RequestError as error:
                failed = error
            if response is not None and response.status_code not in _RETRIED:
                self._trouble = None
                return response
            self._trouble = type(failed).__name__ if response is None else str(response.status_code)
            if time.monotonic() - began >= self._settings.retry_s:
                return await self._give_up(client, response, failed)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            await _pause((_retry_after_s(response) or pause_s) * random.uniform(1.0, 1.2))

    async def _give_up(
        self, client: httpx.AsyncClient, response: httpx.Response | None, failed: httpx.RequestError | None
    ) -> httpx.Response:
        """Return or raise what a line was refused with; `NotReady` if others would be refused too."""
        try:
            is_there = (await client.get(f"{self._url}/ready")).status_code < HTTPStatus.INTERNAL_SERVER_ERROR
        except httpx.RequestError:
            is_there = False
        if not is_there:
            reason = repr(failed) if response is None else f"{response.status_code} {response.text[:200]}"
            raise NotReady(
                f"the server takes no requests ({reason}), tried for {self._settings.retry_s:g} s: the same command "
                "goes on when it is there again"
            )
        if response is None:
            assert failed is not None
            raise failed
        return response

    async def _watch(self, show: Callable[[BatchProgress], object]) -> None:
        show(self.progress())
        self._total = await asyncio.to_thread(self._file.count)
        while True:
            show(self.progress())
            await asyncio.sleep(_WATCH_S)

    async def _watch_hits(self) -> None:
        """Read how many of the items were known, where the server shows its metrics to this client."""
        async with self._clients() as client:
            before = await self._lookups(client)
            while before is not None and (now := await self._lookups(client)) is not None:
                hits, queries = (new - old for new, old in zip(now, before, strict=True))
                self._hits = hits / queries if queries > 0 else self._hits
                await asyncio.sleep(_WATCH_S)

    async def _lookups(self, client: httpx.AsyncClient) -> tuple[float, float] | None:
        with contextlib.suppress(httpx.HTTPError, ValueError):
            found = Scrape.parse((await client.get(f"{self._url}/metrics")).raise_for_status().text)
            hits, queries = metrics.MM_CACHE_HITS, metrics.MM_CACHE_QUERIES
            return found.total(hits, tier="processor"), found.total(queries, tier="processor")
        return None


async def _pause(seconds: float) -> None:
    await asyncio.sleep(seconds)


def _retry_after_s(response: httpx.Response | None) -> float | None:
    """Return the seconds that a server asks for; a date is not read."""
    with contextlib.suppress(ValueError):
        if response is not None and (seconds := float(response.headers.get("retry-after", ""))) > 0:
            return min(seconds, _MAX_PAUSE_S)
    return None


def _body(response: httpx.Response) -> Any:
    try:
        return response.json()
    except (ValueError, RecursionError):
        return response.text


def _custom_id(data: bytes) -> str | None:
    """Return the id of a line that is no request, if it has one."""
    with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
        found = msgspec.json.decode(data)
        if isinstance(found, dict) and isinstance(found.get("custom_id"), str):
            return str(found["custom_id"])
    return None


def _file_reader(settings: BatchSettings) -> Callable[[str], Awaitable[str]] | None:
    """Return what reads a file of the folder by its URL, as a data URL; None if no folder is named."""
    if settings.allowed_local_media_path is None:
        return None
    from semel.media.fetch.local import read_file
    from semel.media.fetch.policy import MediaPolicy
    from semel.media.fetch.url import FileUrl, parse_url

    policy = MediaPolicy.of(local_path=settings.allowed_local_media_path)
    folder = policy.allowed_folder
    assert folder is not None

    async def read(text: str) -> str:
        url = parse_url(text)
        policy.check(url)
        if not isinstance(url, FileUrl):
            raise InvalidRequest(f"{text[:100]} is no URL of a file")
        data = await read_file(url, folder, max_bytes=_MAX_FILE_BYTES, spend=lambda _: None)
        kind = mimetypes.guess_type(url.path)[0] or "application/octet-stream"
        return f"data:{kind};base64,{b64encode(data).decode()}"

    return read
