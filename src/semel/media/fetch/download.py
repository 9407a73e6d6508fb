"""One HTTP download, hop by hop: the whole policy applies to every hop, the limits to every byte.

Redirects are followed here and not by the client library, so that each is checked like a URL in a request (threats S1,
S3). A server is not trusted: not with lengths, not with time, not with compression (S4). Its error texts go at most to
the log, without the URL's path and query, which may be secret; clients see only semel's own messages (S7). A limit per
tenant applies: slow servers that one tenant names cannot occupy all connections or lookups (S18).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Final

import aiohttp
from yarl import URL

from semel.errors import InvalidRequest, MediaNotAllowed, MediaTooLarge, MediaUnavailable
from semel.fairness.limits import KeyedLimit
from semel.media.fetch.connector import CheckedConnector, Lookup, look_up
from semel.media.fetch.freshness import HEADERS, Freshness
from semel.media.fetch.policy import MediaPolicy, unreachable
from semel.media.fetch.responses import StoredResponse
from semel.media.fetch.settings import FetchLimits
from semel.media.fetch.url import WebUrl

__all__ = ["Downloader", "FetchLimits"]

_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_FIELDS: Final = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "semel"}

logger = logging.getLogger(__name__)


class Downloader:
    """Downloads under a policy. It belongs to the event loop in which it is created and must be closed."""

    def __init__(
        self,
        policy: MediaPolicy,
        limits: FetchLimits,
        *,
        lookup: Lookup | None = None,
        tls: ssl.SSLContext | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._policy = policy
        self._limits = limits
        self._tls: ssl.SSLContext | bool = True if tls is None else tls
        self._now = now
        self._tenants: KeyedLimit[str] = KeyedLimit(limits.fetches_per_tenant)
        self._hosts: KeyedLimit[tuple[str, str, int]] = KeyedLimit(limits.fetches_per_tenant_and_host)
        # Threads of its own: an event loop has few threads for lookups, and other work uses them too.
        self._threads = ThreadPoolExecutor(limits.connections, "lookup")
        self._session = aiohttp.ClientSession(
            connector=CheckedConnector(
                policy,
                lookup or partial(look_up, threads=self._threads),
                connections=limits.connections,
                connections_per_host=limits.connections_per_host,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            # The caller enforces the total time, over all hops.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_s, sock_read=limits.idle_s),
            auto_decompress=False,
            trust_env=False,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def download(
        self, url: WebUrl, spend: Callable[[int], None], stored: StoredResponse | None = None, *, tenant: str
    ) -> StoredResponse:
        """Download a URL. `stored` is the response of an earlier download; it is returned if the origin confirms it.

        Calls `spend` for every part before it is stored; what `stored` holds is its caller's. Permits are per tenant
        name alone: clients can choose any salt.
        """
        try:
            async with asyncio.timeout(self._limits.total_s):
                with (await self._tenants.permit(tenant)).current():
                    return await self._follow(url, spend, stored, tenant)
        except TimeoutError as error:
            logger.info("fetching %s took too long: %s", url, _reason(error))
            raise MediaUnavailable(
                f"its server took too long: there are {self._limits.connect_s:g} s to connect, {self._limits.idle_s:g} "
                f"between two pieces, and {self._limits.total_s:g} for all of it, with other fetches that it waits for "
                "(--media-timeout-s)"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            logger.info("fetching %s failed: %s", url, _reason(error))
            raise MediaUnavailable("its server cannot be connected to, or broke off its answer") from None

    async def _follow(
        self, url: WebUrl, spend: Callable[[int], None], stored: StoredResponse | None, tenant: str
    ) -> StoredResponse:
        """Download hop by hop. The result is usable as long as every hop is."""
        hops = [url]
        passed: list[Freshness] = []
        self._policy.check(url)
        while True:
            known = stored if stored is not None and stored.hops[-1] == hops[-1] else None
            with await self._hosts.permit((tenant, hops[-1].host, hops[-1].port)):
                answer = await self._ask(hops[-1], spend, known)
            if answer.location is None:
                freshness = reduce(Freshness.limited_by, passed, answer.freshness)
                return StoredResponse(answer.data, freshness, tuple(hops))
            if len(hops) > self._limits.max_redirects:
                raise MediaUnavailable(f"it redirects more than {self._limits.max_redirects} times")
            self._policy.check(answer.location, previous=hops[-1])
            passed.append(answer.freshness)
            hops.append(answer.location)

    async def _ask(self, url: WebUrl, spend: Callable[[int], None], known: StoredResponse | None) -> _Answer:
        """Send one request and read its response."""
        sent_at = self._now()
        async with await self._get(url, {} if known is None else known.freshness.conditions()) as response:
            received_at = self._now()
            fields = {name: ",".join(found) for name in HEADERS if (found := response.headers.getall(name, None))}
            if response.status == 304 and known is not None:
                freshness = known.freshness.confirmed(fields, sent_at=sent_at, received_at=received_at)
                return _Answer(freshness, known.data)
            freshness = Freshness.of(fields, sent_at=sent_at, received_at=received_at)
            if response.status in _REDIRECTS:
                return _Answer(freshness, location=_location(url, response))
            return _Answer(freshness, await self._body(response, spend))

    async def _get(self, url: WebUrl, conditions: Mapping[str, str]) -> aiohttp.ClientResponse:
        """Return the head of a response; retried once if the connection fails.

        The client library itself retries once if a connection breaks before the response.
        """
        try:
            return await self._try(url, conditions)
        except aiohttp.ClientConnectorError as error:
            if isinstance(error, aiohttp.ClientSSLError):
                raise
            logger.info("fetching %s: %s; once more", url, _reason(error))
            return await self._try(url, conditions)

    async def _try(self, url: WebUrl, conditions: Mapping[str, str]) -> aiohttp.ClientResponse:
        try:
            return await self._session.get(
                _request_url(url), headers={**_FIELDS, **conditions}, allow_redirects=False, ssl=self._tls
            )
        except aiohttp.ClientConnectorDNSError as error:
            logger.info("fetching %s is refused: %s", url, _reason(error))
            raise unreachable() from None

    async def _body(self, response: aiohttp.ClientResponse, spend: Callable[[int], None]) -> bytes:
        limit = self._limits.max_bytes
        if response.status != 200:
            raise MediaUnavailable(f"its server answers with status {response.status}")
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise MediaUnavailable("its server compresses what we asked for uncompressed")
        parts: list[bytes] = []
        size = response.content_length or 0
        if size <= limit:
            size = 0
            async for part in response.content.iter_any():
                size += len(part)
                if size > limit:
                    break
                spend(len(part))
                parts.append(part)
        if size > limit:
            raise MediaTooLarge(f"it has over {limit:,} bytes; raise the limit with --max-media-bytes")
        if not size:
            raise MediaUnavailable("its server answers with nothing")
        return b"".join(parts)


@dataclass(frozen=True, slots=True)
class _Answer:
    """A server's response to one request: the bytes, or a redirect."""

    freshness: Freshness
    data: bytes = field(default=b"", repr=False)
    location: WebUrl | None = None


def _request_url(url: WebUrl) -> URL:
    """Return the URL as the client library needs it, from its parts: nothing in it is parsed or quoted again."""
    path, _, query = url.target.partition("?")
    return URL.build(scheme=url.scheme, host=url.host, port=url.port, path=path, query_string=query, encoded=True)


def _location(url: WebUrl, response: aiohttp.ClientResponse) -> WebUrl:
    locations = response.headers.getall("Location", [])
    if len(locations) != 1:
        raise MediaUnavailable("its server redirects, but not to one place")
    try:
        return url.join(locations[0])
    except InvalidRequest as error:
        logger.info("%s redirects to where we do not follow: %s", url, error)
        raise MediaNotAllowed("it redirects to what is no plain URL of https or http") from None


def _reason(error: BaseException) -> str:
    """Return the reason of a failure, for the log. The texts of aiohttp's own errors contain whole URLs."""
    cause = error.__cause__ if isinstance(error, aiohttp.ClientError) else error
    return type(error).__name__ + (f": {cause}" if isinstance(cause, OSError) and str(cause) else "")
