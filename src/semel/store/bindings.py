"""Names that tenants gave to media (`uuid`), which frontends share through the media store: what each is bound to.

A binding is a file of a store of its own (`MediaStore`), so that what holds for files holds for it: its tenant's share,
eviction, expiry. Where it is follows from the tenant, the name and the time, so two frontends that bind a name at once
write to the same place, and the store lets one of them create it. A name that is bound to one content can only become
ambiguous, never bound to another: frontends `merge` what they know, in any order and again after a fault.

A place is used for one period, `ttl_s`, and read for one more: then it expires. What is used in its second period is
copied to the next place. Nothing is ever deleted that a frontend might be writing anew.

In a record are the content, and the digest of its item for one processor and set of options::

    SEAL  ENCRYPTED

The seal is a keyed hash of the place and of what is encrypted, with a stream of bytes that a keyed hash makes of the
seal. So the owner of a bucket learns nothing from a record but its tenant's pseudonym, and cannot make or move one.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from hmac import compare_digest
from typing import Final, cast

from semel.core import Digest, Key, Modality, hash_parts
from semel.errors import MediaStoreUnavailable
from semel.store.clock import FileClock
from semel.store.index import SMALLEST_BYTES
from semel.store.names import StoredFile, object_path, owner_name
from semel.store.objects import BucketObjects, DiskFull, open_objects
from semel.store.settings import MediaStoreSettings
from semel.store.store import MediaStore
from semel.store.upload import Payer
from semel.telemetry.logs import SampledLog

__all__ = ["AMBIGUOUS", "Binding", "BucketBindings", "open_bindings"]

AMBIGUOUS: Final = Digest(bytes(Digest.size))
"""No content has this id: a name that is bound to it means none."""

_NAME_DOMAIN: Final = b"semel.binding.1"
_SEAL_DOMAIN: Final = b"semel.binding.seal.1"
_STREAM_DOMAIN: Final = b"semel.binding.stream.1"
_PROBE: Final = "create-probe"
_PROBE_RETRY_S: Final = 5.0
_FIELDS: Final = struct.Struct("<32s32s32s5s")
_SEAL_BYTES: Final = 32
_RECORD_BYTES: Final = _SEAL_BYTES + _FIELDS.size
_CHARGED_BYTES: Final = 8_192
"""What a record takes: a block of a disk, and one for its folder."""

_ATTEMPTS: Final = 4
_UNKNOWN: Final = Digest(bytes(Digest.size))

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Binding:
    """The content that a name means, and what is known of its item."""

    content: Digest
    modality: Modality
    reference: Digest = _UNKNOWN
    """The content under a processor and options."""

    digest: Digest = _UNKNOWN
    """The digest of the item under these."""


_NO_CONTENT: Final = Binding(AMBIGUOUS, "image")


class BucketBindings:
    """Bindings in a store: `objects`, and the `files` that they are. `run` proves the store, and keeps to the bounds.

    `clock` is that of the files, and `ttl_s` a period.
    """

    def __init__(
        self, objects: BucketObjects, files: MediaStore, *, key: Key, ttl_s: int, clock: Callable[[], float]
    ) -> None:
        self._objects = objects
        self._files = files
        self._key = key
        self._seal_key = Key(hash_parts((_SEAL_DOMAIN,), key).digest())
        self._stream_key = Key(hash_parts((_STREAM_DOMAIN,), key).digest())
        self._ttl_s = ttl_s
        self._clock = clock
        self._creates: bool | None = None
        """Whether the store refuses to create what is there; None until that is known."""
        self._forgeries = SampledLog(logger, logging.ERROR)

    @property
    def is_shared(self) -> bool:
        """False once it is known that frontends cannot share names through this store."""
        return self._creates is not False

    async def merge(self, tenant: str, name: bytes, ours: Binding | None) -> Binding | None:
        """Bind a name to `ours`, if it is given. Returns what it is bound to for all frontends from now on.

        A name that is bound to another content already becomes ambiguous. `name` has the tenant's salt in it.
        """
        if not self._creates:
            raise MediaStoreUnavailable("the media store has not yet shown that it creates no object twice")
        owner = owner_name(tenant, self._key)
        for _ in range(_ATTEMPTS):
            period = int(self._clock()) // self._ttl_s
            place = self._place(owner, name, period)
            stored = await self._read(place)
            if stored is None:
                merged = _merged(await self._read(self._place(owner, name, period - 1)), ours)
                if merged is None or await self._files.create(place, self._pack(place.id, merged)):
                    return merged
            else:
                if (merged := _merged(stored, ours)) != stored:
                    await self._replace(place, cast("Binding", merged))
                return merged
        raise MediaStoreUnavailable("the media store neither has an object nor creates it")

    async def prove(self) -> None:
        """Find out whether the store refuses to create an object that is there: without that nothing is shared."""
        is_there = not await self._objects.create(_PROBE, b"1")
        self._creates = is_there or not await self._objects.create(_PROBE, b"1")
        if not self._creates:
            logger.warning(
                "the media store overwrites an object that it was to create (If-None-Match is ignored): names of media "
                "(uuid) are not shared, and each frontend knows those that were sent to it"
            )

    async def run(self) -> None:
        """Prove the store, and keep to the bounds, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._files.run())
            while self._creates is None:
                with suppress(MediaStoreUnavailable):
                    await self.prove()
                    break
                await asyncio.sleep(_PROBE_RETRY_S)

    async def _read(self, place: StoredFile) -> Binding | None:
        """Return the binding at a place. One that nobody with the key has written there is ambiguous."""
        if (record := await self._files.get(place)) is None:
            return None
        if (binding := self._unpack(place.id, bytes(record))) is None:
            self._forgeries.log("a name in the media store is not as it was stored: it is ambiguous from now on")
            return _NO_CONTENT
        return binding

    async def _replace(self, place: StoredFile, binding: Binding) -> None:
        data = self._pack(place.id, binding)
        try:
            await self._objects.put(object_path(place), data, payer=Payer(place.owner))
        except DiskFull:
            raise MediaStoreUnavailable("the disk of the media store is full") from None

    def _place(self, owner: str, name: bytes, period: int) -> StoredFile:
        """Return the file that the binding of a name is in a period. Its object's name does not depend on the rest."""
        parts = _NAME_DOMAIN, owner.encode(), name, str(period).encode()
        return StoredFile(
            id=Digest(hash_parts(parts, self._key).digest()),
            owner=owner,
            nbytes=_RECORD_BYTES,
            revision=1,
            created_s=period * self._ttl_s,
            expires_s=(period + 2) * self._ttl_s,
            modality=None,
            purpose="user_data",
            name="",
        )

    def _pack(self, place: Digest, binding: Binding) -> bytes:
        fields = _FIELDS.pack(binding.content, binding.reference, binding.digest, binding.modality.encode())
        seal = self._seal(place, fields)
        return seal + self._crypt(seal, fields)

    def _unpack(self, place: Digest, record: bytes) -> Binding | None:
        if len(record) != _RECORD_BYTES:
            return None
        seal = record[:_SEAL_BYTES]
        fields = self._crypt(seal, record[_SEAL_BYTES:])
        if not compare_digest(seal, self._seal(place, fields)):
            return None
        content, reference, digest, modality = _FIELDS.unpack(fields)
        return Binding(Digest(content), cast("Modality", modality.decode()), Digest(reference), Digest(digest))

    def _seal(self, place: Digest, fields: bytes) -> bytes:
        return hash_parts((place, fields), self._seal_key).digest()

    def _crypt(self, seal: bytes, fields: bytes) -> bytes:
        """Encrypt or decrypt. Records that differ have other seals, hence other streams (as in SIV modes)."""
        stream = hash_parts((seal,), self._stream_key).digest(length=len(fields))
        return (int.from_bytes(fields) ^ int.from_bytes(stream)).to_bytes(len(fields))


def _merged(stored: Binding | None, ours: Binding | None) -> Binding | None:
    """Return what a name is bound to that two frontends have bound; the item is that of the last one that knows it."""
    if stored is None or ours is None:
        return stored or ours
    if stored.content != ours.content:
        return _NO_CONTENT
    return stored if ours.digest == _UNKNOWN else replace(ours, modality=stored.modality)


def open_bindings(settings: MediaStoreSettings, key: Key) -> BucketBindings | None:
    """Return the bindings in the store that the settings name, if they do."""
    names = settings.for_names()
    if names.location is None:
        return None
    objects, clock = open_objects(names.location, names.timeout_s), FileClock()
    capacity_bytes = names.capacity_bytes // _CHARGED_BYTES * SMALLEST_BYTES  # a file is charged `SMALLEST_BYTES`
    files = MediaStore(objects, key=key, capacity_bytes=capacity_bytes, ttl_s=names.ttl_s, clock=clock)
    return BucketBindings(objects, files, key=key, ttl_s=names.ttl_s, clock=clock)
