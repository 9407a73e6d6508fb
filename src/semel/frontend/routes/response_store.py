"""Responses that clients may continue, read and delete: kept in the media store, at every frontend.

A response is written once, before its last event is sent, with all that it answers; so nobody who has been told that it
is complete misses it, and a continuation reads one record. What the client sees does not depend on the store: if that
fails, the response says `store: false`.

Media go to the files of the tenant while the answer is generated. What waits to be written is on the tenant's account,
also when that of the request has been closed, and is dropped if another tenant needs its share (threats S21).
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Self

import msgspec
from blake3 import blake3

from semel.aio import concurrently, run_if_large
from semel.core import Digest, Media, Tenant
from semel.errors import (
    Busy,
    MediaTooLarge,
    ServiceError,
    UnknownPreviousResponse,
    excerpt,
)
from semel.fairness.circuit_breaker import CircuitOpen
from semel.frontend.api.responses.events import ResponseCompleted, ResponseIncomplete
from semel.frontend.api.responses.request import Turn
from semel.frontend.api.responses.response import Response
from semel.frontend.api.responses.stored import Conversation, MediaMismatch, continued, pack, stored_items
from semel.frontend.budget import Account, Loan
from semel.frontend.http.body import charge_values
from semel.frontend.limits import BodyLimits
from semel.frontend.service import FrontendState
from semel.media.signature import SIGNATURE_BYTES, kind_of
from semel.render import ParsedRequest
from semel.render.offload import run_if_heavy
from semel.store import Upload
from semel.store.names import public_id
from semel.store.records import SealedRecords
from semel.store.store import MediaStore

__all__ = ["ResponseWriter", "StoredResponses"]

_PREVIOUS: Final = "previous_response_id"
_PREFIX: Final = "resp_"
_LIGHT: Final = 64 * 1024
"""Bytes of JSON that are read and written on the event loop, in a millisecond; more are work for a thread."""


@dataclass(frozen=True, slots=True)
class StoredResponses:
    """The responses of all tenants, and the files that are their media."""

    records: SealedRecords
    files: MediaStore
    outcomes: Counter[str]
    """The number of responses that were to be stored, by what became of them: stored, or failed."""

    @classmethod
    def of(cls, state: FrontendState) -> Self | None:
        """Return those of a frontend, if it stores any."""
        records, files = state.response_records, state.media_store
        return None if records is None or files is None else cls(records, files, state.stored_responses)

    async def find(self, tenant: Tenant, id_: str, account: Account) -> memoryview | None:
        """Return the record of a tenant's response, charged; None if it has none of this id."""
        if (name := _name_of(id_)) is None:
            return None
        return await self.records.read(tenant, name, account.take, account.pin)

    async def delete(self, tenant: Tenant, id_: str) -> bool:
        """Delete a response; those that continue it stay. Returns whether there was one."""
        return (name := _name_of(id_)) is not None and await self.records.delete(tenant, name)

    async def continued(self, tenant: Tenant, id_: str, account: Account, limits: BodyLimits) -> Conversation:
        """Return what a response continues; what that takes in memory is charged first."""
        if (record := await self.find(tenant, id_, account)) is None:
            raise UnknownPreviousResponse(
                f"Previous response with id {excerpt(repr(excerpt(id_)))} not found: send the whole conversation as "
                "input",
                param=_PREVIOUS,
            )
        account.take(3 * len(record))  # as bytes, as strings, and as the JSON of the items
        light = len(record) <= _LIGHT
        body = await run_if_heavy(partial(bytes, record), light=light)
        del record
        await charge_values(body, limits, account)
        return await run_if_heavy(partial(continued, memoryview(body), _PREVIOUS), light=light)


class ResponseWriter:
    """One response that is to be stored: first its items, then the answer. `close` ends it, stored or not."""

    def __init__(
        self, stored: StoredResponses, tenant: Tenant, account: Account, turn: Turn, before: Conversation, limit: int
    ) -> None:
        self.name = secrets.token_hex(16)
        """The end of its id: not a client's, which could name two responses alike."""

        self._stored = stored
        self._tenant = tenant
        self._account = account
        self._turn: Turn | None = turn
        self._before = before
        self._max_bytes = limit
        self._items: bytes | None = None
        self._waiting = Loan(account, self._drop)
        """What is not written yet."""
        self._uploading: asyncio.Task[bool] | None = None

    async def take_items(self, parsed: ParsedRequest) -> None:
        """Take the items of the request, once its media are known. The account has them until here."""
        turn, self._turn = self._turn, None
        if turn is None or turn.input is None:
            return
        files = [public_id(content) for content in parsed.contents]
        storing = partial(stored_items, turn.input, self.name, self._before, files)
        turn.input = None
        light = self._account.charged <= _LIGHT
        new = parsed.sent
        try:
            items = await run_if_heavy(storing, light=light)
            self._waiting.hold(len(items) + sum(media.nbytes for media in new.values()))
        except (MediaMismatch, ServiceError, ValueError):  # an unpaired surrogate has no JSON
            return
        finally:
            self._before = Conversation()
        self._items = items
        if new:
            self._uploading = asyncio.create_task(self._upload(new))

    async def settle(self, answer: object) -> None:
        """Store the whole answer, if this is it or the event that has it. It says whether that was done."""
        whole = answer.response if isinstance(answer, ResponseCompleted | ResponseIncomplete) else answer
        if isinstance(whole, Response):
            whole.store = await self._write(whole)
            self._stored.outcomes["stored" if whole.store else "failed"] += 1

    async def close(self) -> None:
        """Give back what is charged. An upload that goes on has charged its own bytes."""
        if self._uploading is not None:
            self._uploading.cancel()
        self._items = None
        self._waiting.clear()

    async def _write(self, response: Response) -> bool:
        try:
            if (uploading := self._uploading) is not None:
                await asyncio.wait([uploading])  # it may have been cancelled, which this is not
                if uploading.cancelled() or not uploading.result():
                    return False
            if (items := self._items) is None or len(items) > self._max_bytes:
                return False
            answer = msgspec.json.encode(response)
            packing = partial(pack, answer, items)
            self._waiting.hold(len(answer) + len(items))
            record = await run_if_large(packing, len(items))
            records = self._stored.records
            writing = partial(records.write, self._tenant, self.name, record, self._pin)
            await records.breaker.call(self._tenant.name, writing)
        except (CircuitOpen, MediaTooLarge, Busy):
            return False
        return True

    async def _upload(self, media: Mapping[Digest, Media]) -> bool:
        """Store the media that are not stored yet as files of the tenant. Returns whether all of them are."""
        files, tenant = self._stored.files, self._tenant.name

        async def put(entry: tuple[Digest, Media]) -> None:
            content, one = entry
            kind = kind_of(one.data[:SIGNATURE_BYTES])
            if kind != "document":  # what it was sent as counts
                kind = one.modality
            if (found := await files.locate(tenant, content)) is None or found.modality != kind:
                hashed = await run_if_large(partial(blake3, one.data), one.nbytes)
                upload = Upload(one.data, hashed.digest(), name="", purpose="user_data", modality=kind)
                await files.put(tenant, upload, self._pin)

        try:
            await self._stored.records.breaker.call(tenant, partial(concurrently, media.items(), put))
        except (CircuitOpen, MediaTooLarge, Busy):
            return False
        self._waiting.drop(sum(one.nbytes for one in media.values()))
        return True

    def _pin(self, nbytes: int) -> Callable[[], None]:
        """Charge what an operation of the store holds until that has ended, since nobody can stop it."""
        loan = Loan(self._account)
        loan.hold(nbytes)
        return loan.clear

    def _drop(self, _: ServiceError) -> None:
        """Another tenant needs the room."""
        self._items = None
        if self._uploading is not None:
            self._uploading.cancel()


def _name_of(id_: str) -> str | None:
    """Return the end of an id; None if it cannot be one."""
    name = id_.removeprefix(_PREFIX)
    return name if name != id_ and len(name) == 32 and name.isascii() and name.isalnum() else None
