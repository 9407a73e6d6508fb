"""Responses to fetches, which frontends share through the media store: sealed records, and leases next to them.

A record is a file of the store (`MediaStore`), so that what holds for files holds for it: its tenant's share, eviction,
expiry, a full disk. Its ID is keyed by the tenant, the URL and the rules under which it was fetched (threats S12)::

    SEAL  LENGTH  HEAD  BYTES

The seal is a keyed hash of the ID and all that follows: a record that was changed, or moved to another place, is none.
A lease is an object of its own with the time of its end, written only if there is none of that name.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec

from semel.aio import run_if_large
from semel.core import Digest, Key, hash_parts
from semel.errors import MediaStoreUnavailable, MediaTooLarge
from semel.fairness.limits import KeyedLimit
from semel.media.fetch.freshness import Freshness
from semel.media.fetch.responses import ResponseKey, StoredResponse
from semel.media.fetch.url import WebUrl
from semel.store.names import file_id, owner_name
from semel.store.objects import BucketObjects, open_objects
from semel.store.seal import Seal
from semel.store.settings import MediaStoreSettings
from semel.store.store import REFRESH_S, MediaStore
from semel.store.upload import Payer, Pin, Spend, Upload, no_pin
from semel.telemetry.logs import SampledLog

__all__ = ["BucketResponses", "open_responses"]

_NAME_DOMAIN: Final = b"semel.response.1"
_SEAL_DOMAIN: Final = b"semel.response.seal.1"
_LEASES: Final = "leases"
_LENGTH: Final = struct.Struct("<I")
_TIME: Final = struct.Struct("<d")
_MAX_HEAD_BYTES: Final = 1 << 17
"""Of a few URLs and header fields, each of which is bounded."""

_PIECE_BYTES: Final = 1 << 20

_MAX_PACKED: Final = 64 << 20
"""Bytes of one tenant that records repeat at a time: the account of who fetches has them once."""

_Head = tuple[Freshness, tuple[WebUrl, ...]]
_HEADS: Final = msgspec.msgpack.Decoder(_Head)

logger = logging.getLogger(__name__)


class BucketResponses:
    """Responses and leases in a store: `objects`, and the `files` that they are. `run` keeps to the bounds.

    `scope` are the rules under which responses were fetched: frontends with other rules have other responses. Larger
    ones than `max_bytes` are not read.
    """

    def __init__(
        self,
        objects: BucketObjects,
        files: MediaStore,
        *,
        key: Key,
        scope: bytes,
        max_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._objects = objects
        self._files = files
        self._key = key
        self._seal = Seal(_SEAL_DOMAIN, key)
        self._scope = scope
        self._max_bytes = Seal.NBYTES + _LENGTH.size + _MAX_HEAD_BYTES + max_bytes
        self._clock = clock
        self._packing: KeyedLimit[str] = KeyedLimit(_MAX_PACKED)
        self._leases: set[str] = set()
        """Those that there were at the last sweep."""
        self._forgeries = SampledLog(logger, logging.ERROR)

    async def read(self, key: ResponseKey, spend: Spend, pin: Pin = no_pin) -> StoredResponse | None:
        """Return a response as it was written. `spend` is called with its bytes before they are read."""
        digest = self._id(key)
        if (found := await self._files.open(key[0].name, digest, spend, pin, self._max_bytes)) is None:
            return None
        response = await run_if_large(partial(self._unpack, digest, found[1]), len(found[1]))
        if response is None:
            self._forgeries.log("a response in the media store is not as it was stored: it is fetched again")
        return response

    async def write(self, key: ResponseKey, response: StoredResponse, pin: Pin = no_pin) -> None:
        """Store a response in place of the previous one, if there is room."""
        tenant, nbytes = key[0].name, len(response.data)
        await self._packing.take(tenant, nbytes)
        try:
            data = await run_if_large(partial(self._pack, self._id(key), response), nbytes)
            await self._files.put(tenant, Upload(data, self._content(key), name="", purpose="user_data"), pin)
        except MediaTooLarge:
            return
        finally:
            self._packing.release(tenant, nbytes)

    async def delete(self, key: ResponseKey) -> None:
        """Delete a response, if there is one."""
        await self._files.delete(key[0].name, self._id(key))

    async def take_lease(self, key: ResponseKey, lease_s: float) -> bool:
        """Take the lease of a URL unless somebody has it. Returns whether it was taken."""
        path, payer = self._lease(key)
        return await self._objects.create(path, _TIME.pack(self._clock() + lease_s), payer=payer)

    async def lease_left_s(self, key: ResponseKey) -> float | None:
        """Return for how many seconds the lease of a URL is valid; None if nobody has it."""
        path, payer = self._lease(key)
        ends_at = await self._objects.get(path, _TIME.size, payer=payer)
        if ends_at is None:
            return None
        return float(_TIME.unpack(ends_at)[0]) - self._clock() if len(ends_at) == _TIME.size else 0.0

    async def end_lease(self, key: ResponseKey) -> None:
        """End the lease of a URL."""
        path, payer = self._lease(key)
        await self._objects.delete([path], payer=payer)

    async def sweep(self) -> None:
        """Delete the leases that there were at the last sweep already: their owners have ended."""
        found = {path async for page in self._objects.list(_LEASES) for path, _ in page}
        await self._objects.delete(found & self._leases)
        self._leases = found

    async def run(self) -> None:
        """Keep to the bounds, for ever."""
        keeping = asyncio.create_task(self._files.run())
        try:
            while True:
                await asyncio.sleep(REFRESH_S)
                with suppress(MediaStoreUnavailable):
                    await self.sweep()
        finally:
            keeping.cancel()

    def _content(self, key: ResponseKey) -> bytes:
        """Return what stands for the content of a URL in the IDs of files: it does not depend on the bytes."""
        tenant, url = key
        origin = (url.scheme, url.host, str(url.port), url.target)
        return hash_parts((_NAME_DOMAIN, *tenant.parts, self._scope, *map(str.encode, origin)), self._key).digest()

    def _id(self, key: ResponseKey) -> Digest:
        return file_id(self._content(key), key[0].name, self._key)

    def _lease(self, key: ResponseKey) -> tuple[str, Payer]:
        """Return where the lease of a URL is, and whose it is."""
        owner = owner_name(key[0].name, self._key)
        return f"{_LEASES}/{owner}/{self._id(key).hex()}", Payer(owner)

    def _pack(self, digest: Digest, response: StoredResponse) -> bytes:
        head = msgspec.msgpack.encode((response.freshness, response.hops))
        return self._seal.close(digest, _LENGTH.pack(len(head)), head, response.data)

    def _unpack(self, digest: Digest, record: memoryview) -> StoredResponse | None:
        """Return a response from its record; None for one that nobody with the key has written under this ID."""
        if (content := self._seal.open(digest, record)) is None:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(content)[0]
        try:
            freshness, hops = _HEADS.decode(content[_LENGTH.size : end])
        except msgspec.DecodeError:  # another version's
            return None
        # Copied piece by piece: one copy of 60 MiB keeps the interpreter from an event loop for 30 ms.
        pieces = [bytes(content[at : at + _PIECE_BYTES]) for at in range(end, len(content), _PIECE_BYTES)]
        return StoredResponse(b"".join(pieces), freshness, hops)


def open_responses(
    settings: MediaStoreSettings | None, key: Key, scope: bytes, max_bytes: int
) -> BucketResponses | None:
    """Return the responses in the store that the settings name, if they do."""
    if settings is None or settings.location is None:
        return None
    objects = open_objects(settings.location, settings.timeout_s)
    files = MediaStore(objects, key=key, capacity_bytes=settings.capacity_bytes, ttl_s=settings.ttl_s)
    return BucketResponses(objects, files, key=key, scope=scope, max_bytes=max_bytes)
