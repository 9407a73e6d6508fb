"""Fetches for plain vLLM under semel's media policy (threats S1 to S5), where the operator named domains.

vLLM checks the host of a URL by its name. Here its address must be public too, or in a network that the operator
allows, each redirect is checked like the URL itself, and bytes and time are bounded.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from functools import cache
from typing import Any, Final

from vllm import envs
from vllm.exceptions import VLLMUnprocessableEntityError

from semel.core import Tenant
from semel.errors import ConfigError, MediaTooLarge, RequestError
from semel.media.fetch.fetch import Fetcher, FetchOptions
from semel.media.fetch.policy import HostRule, MediaPolicy
from semel.media.fetch.settings import FetchLimits
from semel.media.fetch.url import WebUrl, parse_url
from semel.vllm_plugin.levels import logger

__all__ = ["CheckedConnection", "connection_for", "fetch_options"]

_NETWORKS: Final = "SEMEL_ALLOWED_MEDIA_NETWORKS"
_WORDS: Final = {
    "--allowed-media-networks": _NETWORKS,
    "--max-media-bytes": "VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB",
    "--media-timeout-s": "VLLM_IMAGE_FETCH_TIMEOUT and the like",
}
"""The flags in semel's messages, and what sets the same for plain vLLM."""


class _NamedHost(HostRule):
    """A host that the operator of vLLM named, at any port, as vLLM takes it."""

    __slots__ = ()

    def matches(self, url: WebUrl) -> bool:
        return self.names(url.host)


class CheckedConnection:
    """The part of vLLM's `HTTPConnection` that its media connector calls. The fetches have a thread of their own."""

    def __init__(self, options: FetchOptions) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="semel-fetch", daemon=True)
        self._thread.start()
        self._fetcher = asyncio.run_coroutine_threadsafe(_open(options), self._loop).result()
        atexit.register(self.close)

    def get_bytes(self, url: str, *, timeout: float | None = None, max_bytes: int | None = None, **_: Any) -> bytes:
        """Return the bytes of a URL; redirects are followed as the options say."""
        return self._submit(url, timeout, max_bytes).result()

    async def async_get_bytes(
        self,
        url: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 (vLLM's name)
        max_bytes: int | None = None,
        **_: Any,
    ) -> bytes:
        """Return the bytes of a URL; redirects are followed as the options say."""
        return await asyncio.wrap_future(self._submit(url, timeout, max_bytes))

    def close(self) -> None:
        """Close all connections and end the thread."""
        atexit.unregister(self.close)
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._fetcher.close(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _submit(self, url: str, timeout_s: float | None, max_bytes: int | None) -> Future[bytes]:
        return asyncio.run_coroutine_threadsafe(self._fetch(url, timeout_s, max_bytes), self._loop)

    async def _fetch(self, url: str, timeout_s: float | None, max_bytes: int | None) -> bytes:
        received = 0

        def spend(nbytes: int) -> None:
            nonlocal received
            received += nbytes
            if max_bytes is not None and received > max_bytes:
                raise MediaTooLarge(f"it has over {max_bytes:,} bytes")

        try:
            async with asyncio.timeout(timeout_s):
                return await self._fetcher.fetch(parse_url(url), Tenant(), spend=spend)
        except RequestError as error:
            reason = str(error)
            for flag, variable in _WORDS.items():
                reason = reason.replace(flag, variable)
            message = f"Failed to fetch media from URL: {reason}"
            raise VLLMUnprocessableEntityError(message, parameter="image_url", value=url) from None


async def _open(options: FetchOptions) -> Fetcher:
    return Fetcher(options)


def fetch_options(domains: tuple[str, ...] = ()) -> FetchOptions:
    """Return the policy for these domains, with the operator's networks and vLLM's limits.

    Raise `ConfigError` for a network. A domain that is none allows nothing: vLLM compares hosts with it as it is.
    """
    networks = [text.strip() for text in os.environ.get(_NETWORKS, "").split(",") if text.strip()]
    allowed = MediaPolicy.of(networks=networks).allowed_networks
    # vLLM fetches over plain http, too, and so do clients who have such URLs.
    policy = MediaPolicy(tuple(_rules(domains)), allow_http=True, allowed_networks=allowed)
    usual = FetchLimits()
    limits = FetchLimits(
        # vLLM has no limit at 0 and below.
        max_bytes=max(envs.VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB, 0) << 20 or sys.maxsize,
        # The longest of them: each fetch comes with the timeout of its modality.
        total_s=max(
            *(usual.total_s, envs.VLLM_IMAGE_FETCH_TIMEOUT),
            *(envs.VLLM_VIDEO_FETCH_TIMEOUT, envs.VLLM_AUDIO_FETCH_TIMEOUT),
        ),
        max_redirects=usual.max_redirects if envs.VLLM_MEDIA_URL_ALLOW_REDIRECTS else 0,
        # A tenant may have a quarter of them, and here is one tenant.
        connections=4 * usual.connections,
        connections_per_host=4 * usual.connections_per_host,
    )
    return FetchOptions(policy, limits, cache_bytes=0)


def _rules(domains: tuple[str, ...]) -> Iterator[HostRule]:
    for domain in domains:
        try:
            yield _NamedHost.parse(domain)
        except ConfigError as error:
            logger.warning("semel: no media are fetched from %s: %s", domain, error)


@cache
def connection_for(domains: tuple[str, ...], own: Any) -> Any:
    """Return the connection for the domains that an operator named; vLLM's own where semel's cannot be made."""
    try:
        connection = CheckedConnection(fetch_options(domains))
    except Exception as error:  # noqa: BLE001 (a fault here is semel's, and vLLM fetches without it)
        logger.warning("semel: media are fetched by vLLM alone: %s: %s", type(error).__name__, error)
        return own
    logger.info("semel: media of %s are fetched from public addresses (or %s)", ", ".join(domains), _NETWORKS)
    return connection
