"""From sources to media: fetches the URLs of a request, with limited concurrency. Equal URLs are fetched once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Literal, Protocol, cast

from semel.aio import concurrently
from semel.core import Media, Tenant
from semel.errors import MediaNotAllowed, RequestError
from semel.media.fetch.url import Url
from semel.render.media.source import PDF, Document, DocumentPage, MediaFile, MediaName, MediaUrl, Source
from semel.store import Pin

__all__ = ["Fetch", "Fetched", "Intent", "Spend", "fetch_sources"]

Intent = Literal["execute", "inspect"]
"""`execute`: the result goes to an engine, and uses the feature cache and its counters. `inspect`: the result is only
returned, by a second path that changes nothing which `execute` can see. The default is `execute`.
"""


_FETCHES_AT_ONCE: Final = 8
"""Maximum fetches of one request at a time: a few requests with slow URLs must not use up their tenant's limit (threats
S18).
"""

Spend = Callable[[int], None]
"""Is called with the number of bytes before a request stores them, and raises if they are not allowed."""


Fetched = Media | MediaFile | MediaName | Document | DocumentPage
"""A source with nothing to fetch."""


class Fetch(Protocol):
    """Returns the bytes behind a URL, from the network or a cache."""

    async def __call__(self, url: Url, tenant: Tenant, /, *, apart: bool, spend: Spend, pin: Pin) -> bytes:
        """Return the bytes. `apart` is for an inspection, which must change nothing that other requests can see.

        `pin` is called while a store reads or writes them.
        """
        ...


async def fetch_sources(
    sources: Sequence[Source], fetch: Fetch | None, tenant: Tenant, intent: Intent, spend: Spend, pin: Pin
) -> Sequence[Fetched]:
    """Return the media of all sources, in order. If nothing has to be fetched, the sources are returned unchanged."""
    wanted: dict[Url, MediaUrl] = {}
    for source in sources:
        url = source.document if isinstance(source, Document) else source
        if isinstance(url, MediaUrl):
            wanted.setdefault(url.url, url)
    if not wanted:
        return cast("Sequence[Fetched]", sources)
    got: dict[Url, bytes] = {}

    async def get(source: MediaUrl) -> None:
        try:
            if fetch is None:
                raise MediaNotAllowed("nothing is fetched here: send a data URL")
            got[source.url] = await fetch(source.url, tenant, apart=intent == "inspect", spend=spend, pin=pin)
        except RequestError as error:  # other requests may wait for the same fetch and get the same error object
            raise error.at(source.where) from None

    await concurrently(wanted.values(), get, at_once=_FETCHES_AT_ONCE)

    def fetched(source: Source) -> Fetched:
        if isinstance(source, MediaUrl):
            return Media(source.modality, got[source.url])
        if isinstance(source, Document) and isinstance(url := source.document, MediaUrl):
            return replace(source, document=Media(url.modality, got[url.url], PDF))
        return source

    return [fetched(source) for source in sources]
