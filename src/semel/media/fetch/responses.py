"""Cache of fetched bytes, by URL and tenant.

It only saves fetches and never decides an identity: the bytes do (threats S11). A tenant finds only its own fetches, so
that no tenant learns by timing what others fetch (S12).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import itemgetter
from sys import getsizeof
from typing import Final

from semel.core import LruMap, Tenant
from semel.media.fetch.freshness import Freshness
from semel.media.fetch.url import WebUrl

__all__ = ["ResponseCache", "ResponseKey", "StoredResponse"]

ResponseKey = tuple[Tenant, WebUrl]

_OVERHEAD_BYTES: Final = 2_048
"""The charge of an entry besides its bytes and its texts: the objects that hold them."""

_HOP_BYTES: Final = 256
"""The same, for every URL."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A fetched response."""

    data: bytes = field(repr=False)
    freshness: Freshness
    hops: tuple[WebUrl, ...]
    """The URLs that led to it, from the requested one to the one that had the bytes."""


class ResponseCache:
    """The most recently used responses, bounded in bytes."""

    def __init__(self, capacity_bytes: int) -> None:
        self._stored: LruMap[ResponseKey, tuple[int, StoredResponse]] = LruMap(capacity_bytes, itemgetter(0))
        """Each with what it takes."""

    @property
    def nbytes(self) -> int:
        """Bytes of the cached responses."""
        return self._stored.weight

    def __len__(self) -> int:
        return len(self._stored)

    def get(self, key: ResponseKey) -> StoredResponse | None:
        """Return a response, fresh or stale, which becomes the most recently used."""
        return None if (stored := self._stored.get(key)) is None else stored[1]

    def peek(self, key: ResponseKey) -> StoredResponse | None:
        """Return a response, for somebody who leaves no trace."""
        return None if (stored := self._stored.peek(key)) is None else stored[1]

    def put(self, key: ResponseKey, response: StoredResponse) -> None:
        """Cache a response in place of the previous one, unless caching is forbidden or it is larger than the cache."""
        if response.freshness.storable:
            self._stored.put(key, (_charge(key, response), response))
        else:
            self._stored.pop(key)


def _charge(key: ResponseKey, response: StoredResponse) -> int:
    """Return what an entry takes, its URLs, its tenant and the fields that its server chose included (threats S24)."""
    tenant, url = key
    urls = {id(one): one for one in (url, *response.hops)}.values()  # the first hop is the key's own
    texts = [tenant.name, tenant.salt or "", *response.freshness.headers.values()]
    texts += [text for one in urls for text in (one.host, one.target)]
    return _OVERHEAD_BYTES + _HOP_BYTES * len(urls) + getsizeof(response.data) + sum(map(getsizeof, texts))
