"""The ledger: what a frontend knows that one worker has (D1, D2).

A digest is known for one of two reasons. The worker announced it and has not withdrawn it; announcements are numbered,
and only they change this part. Or a request of this frontend has just sent it: a *note*, which covers the time until
the worker reports the outcome.

Every request *counts on* all its digests from its submission until it is settled: the worker may let it wait for a
transfer that this session has already started. So a note, and its transfer, lives until the last request that counts on
it is settled, even if the request that sent it is gone. Nothing remains when all requests are settled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from semel.core import Digest, FeatureInfo
from semel.errors import ProtocolError
from semel.ledger.announced import Announced

__all__ = ["Ledger"]


@dataclass(slots=True)
class _Request:
    digests: set[Digest] = field(default_factory=set)
    """The digests that it counts on."""
    needed: set[Digest] = field(default_factory=set)
    """The digests that the worker asked for on behalf of this request, and stores for it from then on."""
    sent: set[Digest] = field(default_factory=set)


class Ledger:
    """What one worker has, as far as this frontend knows, over successive sessions."""

    def __init__(self, max_digests: int = 1 << 20, max_layout_tokens: int = 1 << 23) -> None:
        self._announced = Announced(max_digests, max_layout_tokens)
        self._next: int | None = None
        self._requests: dict[str, _Request] = {}
        self._counting: dict[Digest, int] = {}  # requests that count on it
        self._notes: dict[Digest, int] = {}  # requests that sent it and are not settled; a note may outlive them

    def __len__(self) -> int:
        """Number of announced digests."""
        return len(self._announced)

    @property
    def unsettled(self) -> int:
        """Number of unsettled requests."""
        return len(self._requests)

    # The session.

    def open(self) -> None:
        """Begin a session: nothing is known or in transfer, and announcements count from 0."""
        self.close()
        self._next = 0

    def close(self) -> None:
        """End the session and forget everything known from it."""
        self._next = None
        self._announced.clear()
        self._requests.clear()
        self._counting.clear()
        self._notes.clear()

    # Announcements of the worker.

    def have(self, number: int, holdings: Mapping[Digest, FeatureInfo]) -> None:
        """The worker has these from now on."""
        self._count(number)
        for digest, holding in holdings.items():
            self._announced.put(digest, holding)

    def gone(self, number: int, digests: Iterable[Digest]) -> None:
        """The worker no longer has these. Unknown digests were forgotten here earlier."""
        self._count(number)
        for digest in digests:
            self._announced.drop(digest)

    # Knowledge.

    def holding(self, digest: Digest) -> FeatureInfo | None:
        """The announced feature info of a digest; None for a digest that is only noted as sent."""
        return self._announced.get(digest)

    def knows(self, digest: Digest) -> bool:
        """Whether a request may refer to a digest without sending it: it is announced or noted as sent."""
        return digest in self._announced or digest in self._notes

    def lacking(self, digests: Iterable[Digest]) -> tuple[Digest, ...]:
        """The unknown digests, each once, in order: the result of `submit`, without its notes."""
        return tuple(digest for digest in dict.fromkeys(digests) if not self.knows(digest))

    # Requests.

    def submit(self, request_id: str, digests: Iterable[Digest]) -> tuple[Digest, ...]:
        """Submit a request. Returns the digests whose features it must send, each once, in order, and notes them as
        sent."""
        if request_id in self._requests:
            raise ValueError(f"request {request_id} is submitted already")
        distinct = dict.fromkeys(digests)
        lacking = self.lacking(distinct)
        request = self._requests[request_id] = _Request()
        self._count_on(request, distinct)
        self._note(request, lacking)
        return lacking

    def need(self, request_id: str, digests: Iterable[Digest]) -> tuple[Digest, ...]:
        """The worker asks for digests of a request. Returns those whose features must be obtained and then sent.

        The result excludes digests that another request is sending now: the worker gives those to both requests. A
        settled request counts again until it is settled again: the engine accepted it and then missed an item. Call
        this when the worker asks, and only for a request that still has a client.
        """
        distinct = dict.fromkeys(digests)
        request = self._requests.setdefault(request_id, _Request())
        request.needed.update(distinct)
        self._count_on(request, distinct)
        return self._not_under_way(request, distinct)

    def send(self, request_id: str, digests: Iterable[Digest]) -> tuple[Digest, ...]:
        """Send needed features that are now available. Returns those that must be sent, and notes them as sent.

        Returns nothing for a request that was settled after the worker asked: it received the feature another way.
        """
        request = self._requests.get(request_id)
        if request is None:
            return ()
        needed = (digest for digest in dict.fromkeys(digests) if digest in request.needed)
        to_send = self._not_under_way(request, needed)
        self._note(request, to_send)
        return to_send

    def settle(self, request_id: str) -> tuple[Digest, ...]:
        """Settle a request that was accepted, failed, or is being aborted: it counts on nothing from now on.

        Returns the digests whose notes end with it. No request waits for their transfers, whichever request started
        them, so they may be withdrawn. Does nothing for a settled request.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return ()
        for digest in request.sent:
            self._notes[digest] -= 1
        ended = []
        for digest in request.digests:
            self._counting[digest] -= 1
            if not self._counting[digest]:
                del self._counting[digest]
                if self._notes.pop(digest, None) is not None:
                    ended.append(digest)
        return tuple(ended)

    def _count(self, number: int) -> None:
        if self._next is None:
            raise ProtocolError(f"announcement {number} came outside of a session")
        if number != self._next:
            raise ProtocolError(f"announcement {number} came where {self._next} was next")
        self._next += 1

    def _count_on(self, request: _Request, digests: Iterable[Digest]) -> None:
        for digest in digests:
            if digest not in request.digests:
                request.digests.add(digest)
                self._counting[digest] = self._counting.get(digest, 0) + 1

    def _note(self, request: _Request, digests: Iterable[Digest]) -> None:
        for digest in digests:
            if digest not in request.sent:
                request.sent.add(digest)
                self._notes[digest] = self._notes.get(digest, 0) + 1

    def _not_under_way(self, request: _Request, digests: Iterable[Digest]) -> tuple[Digest, ...]:
        """The digests that no other unsettled request has sent.

        The worker stores what a request has sent until that request ends there. So if the worker asks although a sender
        is unsettled, that transfer had not arrived when it asked. The transfer will then serve the asking request too.
        """
        return tuple(d for d in digests if self._notes.get(d, 0) <= (d in request.sent))
