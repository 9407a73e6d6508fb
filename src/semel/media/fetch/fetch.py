"""From a URL to bytes: first the policy, then the cache, then one download for all equal fetches.

With a store of responses, it is one for all frontends that have that store (`sharing`). Equal fetches are joined only
within a tenant, and responses belong to one tenant: another tenant's fetch must not be observable (threats S12). A
fetch for an inspection (`apart`) changes nothing that other fetches can observe. The result is bytes, never an
identity: the same URL may return other bytes later (S11).
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, Self

from semel.cache import Flight
from semel.core import Tenant
from semel.errors import MediaNotAllowed, MediaTooLarge, MediaUnavailable, SemelError
from semel.media.fetch.connector import Lookup
from semel.media.fetch.download import Downloader, FetchLimits
from semel.media.fetch.local import read_file
from semel.media.fetch.policy import MediaPolicy
from semel.media.fetch.responses import ResponseCache, ResponseKey, StoredResponse
from semel.media.fetch.settings import FetchSettings
from semel.media.fetch.sharing import Pin, ResponseStore, SharedFetches
from semel.media.fetch.url import FileUrl, Url, WebUrl
from semel.telemetry import metrics
from semel.telemetry.meter import Sample

__all__ = ["FetchOptions", "Fetcher", "Spend"]

Spend = Callable[[int], None]
"""Called with the number of bytes that a request is about to hold. Raises if it must not hold them."""

Outcome = Literal["fetched", "refused", "too_large", "unavailable", "abandoned"]

_OUTCOMES: Final[tuple[tuple[type[Exception], Outcome], ...]] = (
    (MediaNotAllowed, "refused"),
    (MediaTooLarge, "too_large"),
    (MediaUnavailable, "unavailable"),
)


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """The operator's settings for fetches."""

    policy: MediaPolicy = field(default_factory=MediaPolicy)
    limits: FetchLimits = field(default_factory=FetchLimits)
    cache_bytes: int = FetchSettings().cache_bytes
    """Size of the cache of responses, which stay as long as their servers allow; 0 turns it off."""

    @classmethod
    def of(cls, settings: FetchSettings) -> Self:
        """Build from an operator's settings. An invalid value is refused with its flag's name."""
        policy = MediaPolicy.of(
            domains=settings.allowed_domains,
            allow_http=settings.allow_http,
            networks=settings.allowed_networks,
            local_path=settings.allowed_local_path,
        )
        return cls(policy, settings.limits, settings.cache_bytes)


class _Unpaid(Exception):
    """The request that led a fetch has no budget for it. Requests that joined it are not affected."""

    def __init__(self, reason: SemelError) -> None:
        self.reason = reason
        super().__init__(str(reason))


class _Payer:
    """Charges the bytes of a download to the request that leads it, while that request exists."""

    def __init__(self, spend: Spend, pin: Pin | None) -> None:
        self._spend: Spend | None = spend
        self._pin = pin
        self.leads = False

    def spend(self, nbytes: int) -> None:
        if self._spend is None:
            return
        try:
            self._spend(nbytes)
        except SemelError as error:
            raise _Unpaid(error) from None

    def pin(self, nbytes: int) -> Callable[[], None]:
        if self._pin is not None:
            with suppress(SemelError):  # it is just being called back
                return self._pin(nbytes)
        return lambda: None

    def leave(self) -> None:
        self._spend = self._pin = None


@dataclass(slots=True)
class _Counts:
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    nbytes: int = 0
    seconds: float = 0.0
    queries: int = 0
    hits: int = 0
    confirmed: int = 0


class Fetcher:
    """Fetches the media of all requests of a frontend. It belongs to one event loop and must be closed."""

    def __init__(
        self,
        options: FetchOptions,
        *,
        lookup: Lookup | None = None,
        tls: ssl.SSLContext | None = None,
        now: Callable[[], float] = time.time,
        responses: ResponseStore | None = None,
    ) -> None:
        self._options = options
        self._downloader = Downloader(options.policy, options.limits, lookup=lookup, tls=tls, now=now)
        self._now = now
        self._cache = ResponseCache(options.cache_bytes)
        self._flight: Flight[tuple[bool, ResponseKey], bytes] = Flight()
        self._counts = _Counts()
        self._shared = None if responses is None else SharedFetches(responses, self._is_reusable)

    async def close(self) -> None:
        """Close all connections."""
        await self._downloader.close()

    async def fetch(
        self,
        url: Url,
        tenant: Tenant,
        *,
        apart: bool = False,
        spend: Spend = lambda _: None,
        pin: Pin | None = None,
    ) -> bytes:
        """Return the bytes of a URL.

        `spend` is called before bytes are stored: part by part for the call that leads a fetch, all at once for a call
        that joins it or hits the cache. It is never called after this call has ended. `pin` is called for the call that
        leads a fetch, while a store reads or writes the bytes.
        """
        try:
            self._options.policy.check(url)
        except MediaNotAllowed:
            self._counts.outcomes["refused"] += 1
            raise
        if isinstance(url, FileUrl):
            return await self._read_file(url, spend)
        key = tenant, url
        if (stored := self._find(key, apart)) is not None and self._is_usable(stored):
            self._counts.hits += not apart
            spend(len(stored.data))
            return stored.data
        payer = _Payer(spend, pin)
        try:
            data = await self._flight.do((apart, key), partial(self._download, key, stored, apart, payer))
        except _Unpaid as error:
            raise error.reason from None
        finally:
            payer.leave()
        if not payer.leads:
            spend(len(data))
        return data

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of all fetches so far."""
        counts = self._counts
        for outcome, count in counts.outcomes.items():
            yield metrics.MEDIA_FETCHES, count, (outcome,)
        yield metrics.MEDIA_FETCHED_BYTES, counts.nbytes, ()
        yield metrics.MEDIA_FETCH_SECONDS, counts.seconds, ()
        yield metrics.MEDIA_FETCHES_JOINED, self._flight.joined, ()
        yield metrics.MEDIA_CACHE_QUERIES, counts.queries, ()
        yield metrics.MEDIA_CACHE_HITS, counts.hits, ()
        yield metrics.MEDIA_CACHE_CONFIRMED, counts.confirmed, ()
        yield metrics.MEDIA_CACHE_BYTES, self._cache.nbytes, ()
        if self._shared is not None:
            yield metrics.MEDIA_FETCHES, self._shared.hits, ("shared",)
            yield metrics.MEDIA_FETCHES_UNSHARED, self._shared.failures, ()

    def _find(self, key: ResponseKey, apart: bool) -> StoredResponse | None:
        if apart:
            return self._cache.peek(key)
        self._counts.queries += 1
        return self._cache.get(key)

    def _is_usable(self, stored: StoredResponse) -> bool:
        """Return whether a response may be served without revalidation: fresh, and each of its hops still allowed."""
        if not stored.freshness.is_fresh(self._now()):
            return False
        self._check_hops(stored)
        return True

    def _check_hops(self, stored: StoredResponse) -> None:
        previous: WebUrl | None = None
        for hop in stored.hops:
            self._options.policy.check(hop, previous=previous)
            previous = hop

    def _is_reusable(self, stored: StoredResponse, is_new: bool) -> bool:
        """Return whether another frontend's response may be served: fresh, or `is_new`, and each hop allowed here."""
        try:
            self._check_hops(stored)
        except MediaNotAllowed:
            return False  # the origin may lead elsewhere now
        return is_new or stored.freshness.is_fresh(self._now())

    async def _download(self, key: ResponseKey, cached: StoredResponse | None, apart: bool, payer: _Payer) -> bytes:
        payer.leads = True
        ask = partial(self._ask_origin, key, cached, apart, payer)
        if self._shared is None or apart:
            response = await ask(cached)
        else:
            response = await self._shared.fetch(key, cached, payer.spend, payer.pin, ask)
        if not apart:
            self._cache.put(key, response)
        return response.data

    async def _ask_origin(
        self, key: ResponseKey, cached: StoredResponse | None, apart: bool, payer: _Payer, stored: StoredResponse | None
    ) -> StoredResponse:
        """Download a URL, or confirm what is stored: what was `cached` here is not paid for yet."""
        tenant, url = key
        with self._timed():
            response = await self._downloader.download(url, payer.spend, stored, tenant=tenant.name)
            is_confirmed = stored is not None and response.data is stored.data
            if is_confirmed and stored is cached:
                payer.spend(len(response.data))
        if is_confirmed:
            self._counts.confirmed += not apart
        else:
            self._counts.nbytes += len(response.data)
        return response

    async def _read_file(self, url: FileUrl, spend: Spend) -> bytes:
        folder, limits = self._options.policy.allowed_folder, self._options.limits
        assert folder is not None, "the policy lets no file through without a folder"
        with self._timed():
            try:
                async with asyncio.timeout(limits.total_s):
                    data = await read_file(url, folder, max_bytes=limits.max_bytes, spend=spend)
            except TimeoutError:
                raise MediaUnavailable(f"the file could not be read within {limits.total_s:g} s") from None
        if not data:
            raise MediaUnavailable("the file is empty")
        self._counts.nbytes += len(data)
        return data

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count a fetch by its outcome, and its duration."""
        begin = time.monotonic()
        outcome: Outcome = "abandoned"
        try:
            yield
            outcome = "fetched"
        except Exception as error:
            outcome = next((named for kind, named in _OUTCOMES if isinstance(error, kind)), outcome)
            raise
        finally:
            self._counts.outcomes[outcome] += 1
            self._counts.seconds += time.monotonic() - begin
