"""The ledger: what a frontend knows one worker holds (D1, D2).

A claim has one of two grounds. The worker announced the digest and has not taken it back; announcements are numbered,
and only they change this part. Or a request of this frontend has just sent it: a *note*, which covers the time until
the worker has said what became of it.

Every request *counts on* all its digests from its submission until it is settled: the worker may let it wait for
whatever this session is bringing already. So a note, and the transfer behind it, lives until the last request that
counts on it is settled, even if the one that sent it is long gone. Nothing is left when all are settled.
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
    """What it counts on."""
    needed: set[Digest] = field(default_factory=set)
    """What the worker asked for on its behalf, and keeps for it from then on."""
    sent: set[Digest] = field(default_factory=set)


class Ledger:
    """What one worker holds, as far as this frontend knows; one session after another."""

    def __init__(self, max_digests: int = 1 << 20, max_layout_tokens: int = 1 << 23) -> None:
        self._announced = Announced(max_digests, max_layout_tokens)
        self._next: int | None = None
        self._requests: dict[str, _Request] = {}
        self._counting: dict[Digest, int] = {}  # requests that count on it
        self._notes: dict[Digest, int] = {}  # requests that sent it and are not settled; a note may outlive them

    def __len__(self) -> int:
        """How many digests are announced."""
        return len(self._announced)

    @property
    def unsettled(self) -> int:
        """Requests that are not settled."""
        return len(self._requests)

    # The session.

    def open(self) -> None:
        """Begin a session: nothing is known, nothing is under way, and announcements count from 0."""
        self.close()
        self._next = 0

    def close(self) -> None:
        """End the session, and forget all that was known through it."""
        self._next = None
        self._announced.clear()
        self._requests.clear()
        self._counting.clear()
        self._notes.clear()

    # What the worker announces.

    def have(self, number: int, holdings: Mapping[Digest, FeatureInfo]) -> None:
        """The worker holds these from now on."""
        self._count(number)
        for digest, holding in holdings.items():
            self._announced.put(digest, holding)

    def gone(self, number: int, digests: Iterable[Digest]) -> None:
        """The worker holds these no more. One that is not known was forgotten here before."""
        self._count(number)
        for digest in digests:
            self._announced.drop(digest)

    # What is known.

    def holding(self, digest: Digest) -> FeatureInfo | None:
        """What the worker announced of a digest; None also for one that was only just sent."""
        return self._announced.get(digest)

    def knows(self, digest: Digest) -> bool:
        """Whether a request may refer to it without sending it: it was announced, or is noted as sent."""
        return digest in self._announced or digest in self._notes

    def lacking(self, digests: Iterable[Digest]) -> tuple[Digest, ...]:
        """Those that are not known, each once, in order: what `submit` would say, with nothing noted."""
        return tuple(digest for digest in dict.fromkeys(digests) if not self.knows(digest))

    # Requests.

    def submit(self, request_id: str, digests: Iterable[Digest]) -> tuple[Digest, ...]:
        """Submit a request: the digests whose features have to be sent with it, each once, in order, noted as sent."""
        if request_id in self._requests:
            raise ValueError(f"request {request_id} is submitted already")
        distinct = dict.fromkeys(digests)
        lacking = self.lacking(distinct)
        request = self._requests[request_id] = _Request()
        self._count_on(request, distinct)
        self._note(request, lacking)
        return lacking

    def need(self, request_id: str, digests: Iterable[Digest]) -> tuple[Digest, ...]:
        """The worker asks for digests of a request: those whose features have to be got hold of, and then sent.

        Left out is what another request is sending at this moment: the worker gives it to both. A request that is
        settled counts again from now on, until it is settled again: the engine took it and then missed an item. Call
        it when the worker asks, and only for a request that is still wanted.
        """
        distinct = dict.fromkeys(digests)
        request = self._requests.setdefault(request_id, _Request())
        request.needed.update(distinct)
        self._count_on(request, distinct)
        return self._not_under_way(request, distinct)

    def send(self, request_id: str, digests: Iterable[Digest]) -> tuple[Digest, ...]:
        """Send what was needed, now that the features are at hand: those that really have to be, noted as sent.

        Nothing for a request that was settled since the worker asked: it got the feature another way.
        """
        request = self._requests.get(request_id)
        if request is None:
            return ()
        needed = (digest for digest in dict.fromkeys(digests) if digest in request.needed)
        to_send = self._not_under_way(request, needed)
        self._note(request, to_send)
        return to_send

    def settle(self, request_id: str) -> tuple[Digest, ...]:
        """A request was accepted, has failed, or is being aborted: it counts on nothing any more.

        Returned are the digests whose notes end with it. Whatever is still being sent of them, by whichever request,
        nobody waits for: it may be withdrawn. A request that is settled already is left alone.
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
        """Those that no other unsettled request has sent.

        What a request has sent, the worker keeps for it until it ends there. So if the worker asks in spite of an
        unsettled sender, that transfer had not arrived when it asked, and will serve the one that asked as well.
        """
        return tuple(d for d in digests if self._notes.get(d, 0) <= (d in request.sent))
