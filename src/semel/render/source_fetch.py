"""From sources to media: what a request names by URL is fetched, some at a time, and what it names twice once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol, cast

from semel.core import Media, Tenant
from semel.errors import MediaNotAllowed, RequestError
from semel.media.fetch.url import Url
from semel.render.concurrency import concurrently
from semel.render.intent import Intent
from semel.render.source import MediaUrl, Source

__all__ = ["Fetch", "Spend", "fetch_sources"]

_FETCHES_AT_ONCE: Final = 8
"""Of one request: a few with slow URLs must not take all turns of their tenant (threats S18)."""

Spend = Callable[[int], None]
"""Is told how many more bytes a request is about to hold, and raises if it may not."""


class Fetch(Protocol):
    """Gives the bytes behind a URL, wherever they come from."""

    async def __call__(self, url: Url, tenant: Tenant, /, *, apart: bool, spend: Spend) -> bytes:
        """The bytes; `apart` for somebody who only looks, and must change nothing that others can see."""
        ...


async def fetch_sources(
    sources: Sequence[Source], fetch: Fetch | None, tenant: Tenant, intent: Intent, spend: Spend
) -> Sequence[Media]:
    """The media of all sources, in order. They are the sources themselves if nothing is to be fetched."""
    wanted: dict[Url, MediaUrl] = {}
    for source in sources:
        if isinstance(source, MediaUrl):
            wanted.setdefault(source.url, source)
    if not wanted:
        return cast("Sequence[Media]", sources)
    got: dict[Url, bytes] = {}

    async def get(source: MediaUrl) -> None:
        try:
            if fetch is None:
                raise MediaNotAllowed("nothing is fetched here: send a data URL")
            got[source.url] = await fetch(source.url, tenant, apart=intent == "inspect", spend=spend)
        except RequestError as error:  # others may wait for the same fetch: the error itself is theirs as well
            raise type(error)(f"{source.where}: {error}") from None

    await concurrently(wanted.values(), get, at_once=_FETCHES_AT_ONCE)
    return [source if isinstance(source, Media) else Media(source.modality, got[source.url]) for source in sources]
