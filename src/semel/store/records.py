"""Records of tenants under names, sealed, as files of a media store: so each tenant's share, eviction and expiry hold.

A record's ID is keyed by its tenant with its salt, and by its name (threats S12). It is looked up in the store itself,
not in a copy of its index: once it is written, every frontend has it, and once it is deleted, none.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Final

from semel.aio import run_if_large
from semel.core import Key, Tenant, hash_parts
from semel.fairness.circuit_breaker import CircuitBreaker
from semel.store.names import file_id
from semel.store.seal import Seal
from semel.store.settings import MediaStoreSettings
from semel.store.store import MediaStore, open_store
from semel.store.upload import Pin, Spend, Upload
from semel.telemetry.logs import SampledLog

__all__ = ["SealedRecords", "open_records"]

_NAME_DOMAIN: Final = b"semel.record.1"
_SEAL_DOMAIN: Final = b"semel.record.seal.1"
_ALL: Final = 1 << 62
_PATIENCE_S: Final = 60.0
"""More than the store's own timeouts take together."""

_PAUSE_S: Final = 5.0

logger = logging.getLogger(__name__)


class SealedRecords:
    """Records in `files`, a store for nothing else. Every call raises `MediaStoreUnavailable` if the store is."""

    def __init__(self, files: MediaStore, key: Key) -> None:
        self._files = files
        self._key = key
        self._seal = Seal(_SEAL_DOMAIN, key)
        self.breaker = CircuitBreaker(_PATIENCE_S, _PAUSE_S)
        """For writes that can be left out: while the store is down, not each of a tenant's has to find out."""

        self._forgeries = SampledLog(logger, logging.ERROR)

    async def read(self, tenant: Tenant, name: str, spend: Spend, pin: Pin) -> memoryview | None:
        """Return a record as it was written; None if there is none. Its bytes are spent before they are read."""
        digest = file_id(self._content(tenant, name), tenant.name, self._key)
        if (found := await self._files.open(tenant.name, digest, spend, pin, _ALL)) is None:
            return None
        opening = partial(self._seal.open, digest, found[1])
        if (record := await run_if_large(opening, len(found[1]))) is None:
            self._forgeries.log("a record in the media store is not as it was stored: it is answered as unknown")
        return record

    async def write(self, tenant: Tenant, name: str, record: bytes, pin: Pin) -> None:
        """Store a record under a name that has none. Raises `MediaTooLarge` if the tenant cannot have so much."""
        content = self._content(tenant, name)
        closing = partial(self._seal.close, file_id(content, tenant.name, self._key), record)
        data = await run_if_large(closing, len(record))
        await self._files.put(tenant.name, Upload(data, content, name="", purpose="user_data"), pin)

    async def delete(self, tenant: Tenant, name: str) -> bool:
        """Delete a record. Returns whether there was one."""
        return await self._files.delete(tenant.name, file_id(self._content(tenant, name), tenant.name, self._key))

    async def run(self) -> None:
        """Keep to the bounds, for ever."""
        await self._files.run()

    def _content(self, tenant: Tenant, name: str) -> bytes:
        """Return what stands for the content in the IDs of files: it does not depend on the bytes."""
        return hash_parts((_NAME_DOMAIN, *tenant.parts, name.encode()), self._key).digest()


def open_records(settings: MediaStoreSettings | None, key: Key) -> SealedRecords | None:
    """Return the records in the store that the settings name, if they do."""
    files = None if settings is None else open_store(settings, key)
    return None if files is None else SealedRecords(files, key)
