"""The ledger: what a frontend knows that one worker has (D1, D2).

A digest is known for one of two reasons. The worker announced it and has not withdrawn it; announcements are numbered,
and only they change this part. It outlives a session that breaks: the next one tells what has changed since. Or a
request of this frontend has just sent it: a *note*, which covers the time until the worker reports the outcome.

Every request *counts on* all its digests from its submission until it is settled: the worker may let it wait for a
transfer that this session has already started. So a note, and its transfer, lives until the last request that counts on
it is settled, even if the request that sent it is gone. Nothing remains when all requests are settled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from semel.core import Digest, FeatureInfo
from semel.errors import ProtocolError
from semel.ledger.announcement import Announcement
from semel.ledger.directory import Directory, Holders

__all__ = ["Ledger"]


@dataclass(slots=True)
class _Request:
    digests: set[Digest] = field(default_factory=set)
    """The digests that it counts on."""
    needed: set[Digest] = field(default_factory=set)
    """The digests that the worker asked for on behalf of this request, and stores for it from then on."""
    sent: set[Digest] = field(default_factory=set)


class _Announced:
    """The items that one worker has announced and not withdrawn: digests, sizes and layouts, never a tensor (D2).

    It uses little memory: most items of a model share a few feature infos, which come here as one object each
    (`semel.wire.layout_runs`). The number of digests and the bytes of their layouts are bounded. Over a bound, the
    oldest announcements are forgotten, which costs a payload, never an answer.

    Digests are kept as plain bytes, to which they are equal: instances of a class of ours are walked by the garbage
    collector, and with six million of them each of its longer walks stopped the event loop for a quarter of a second.
    """

    def __init__(self, max_digests: int, max_layout_bytes: int, holders: Holders, bit: int) -> None:
        self.max_digests = max_digests
        self.max_layout_bytes = max_layout_bytes
        """Maximum size of the layouts of all digests, as if no two shared one."""
        self._infos: dict[bytes, FeatureInfo] = {}
        self._layout_bytes = 0
        self._holders = holders
        self._bit = bit

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._infos

    def __len__(self) -> int:
        return len(self._infos)

    def get(self, digest: Digest) -> FeatureInfo | None:
        """Return the announced feature info of a digest."""
        return self._infos.get(digest)

    def update(self, infos: Mapping[Digest, FeatureInfo]) -> None:
        """Record an announcement, and forget what exceeds the bounds."""
        for digest in infos.keys() & self._infos.keys():
            self.drop(digest)
        plain = dict(zip(map(bytes, infos), infos.values(), strict=True))
        self._infos.update(plain)
        self._holders.update(plain, self._bit)
        self._layout_bytes += sum([info.layout.nbytes for info in infos.values()])
        while len(self._infos) > self.max_digests or self._layout_bytes > self.max_layout_bytes:
            self.drop(next(iter(self._infos)))

    def drop(self, digest: bytes) -> None:
        """Forget a digest, whether or not it is known."""
        if (info := self._infos.pop(digest, None)) is not None:
            self._layout_bytes -= info.layout.nbytes
            self._holders.discard(digest, self._bit)

    def move(self, holders: Holders, bit: int) -> None:
        """Report to another directory from now on."""
        for digest in self._infos:
            self._holders.discard(digest, self._bit)
            holders.add(digest, bit)
        self._holders, self._bit = holders, bit

    def clear(self) -> None:
        """Forget everything."""
        for digest in self._infos:
            self._holders.discard(digest, self._bit)
        self._infos.clear()
        self._layout_bytes = 0


class Ledger:
    """The items of one worker, as far as this frontend knows, over successive sessions."""

    def __init__(
        self, directory: Directory | None = None, *, max_digests: int = 1 << 20, max_layout_bytes: int = 1 << 26
    ) -> None:
        self._directory = Directory() if directory is None else directory
        self.number = self._directory.enter()
        """The worker's number in its directory."""

        self.bit = 1 << self.number
        """The worker in sets of workers."""

        self._announced = _Announced(max_digests, max_layout_bytes, self._directory.announced, self.bit)
        self._incarnation = b""
        self._known: int | None = None
        """The number of the worker's changes that all announcements up to it have come; None if there were none."""

        self._has_gaps = False
        """True while slices are still to come."""

        self._is_open = False
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

    def move(self, directory: Directory) -> None:
        """Move to another directory, with all that is known."""
        left, number, bit = self._directory, self.number, self.bit
        self._directory, self.number = directory, directory.enter()
        self.bit = 1 << self.number
        self._announced.move(directory.announced, self.bit)
        for digest in self._notes:
            left.sent.discard(digest, bit)
            directory.sent.add(digest, self.bit)
        left.leave(number)

    # The session.

    def open(self, incarnation: bytes = b"") -> None:
        """Begin a session with a worker's process. What the same one announced in the last session stays known, until
        it gets what has changed since; nothing is in transfer."""
        self.close()
        if incarnation != self._incarnation:
            self.forget()
            self._incarnation = incarnation
        self._is_open = True

    def close(self) -> None:
        """End the session. Nothing is in transfer any more; what was announced may serve the next session."""
        self._is_open = False
        self._requests.clear()
        self._counting.clear()
        for digest in self._notes:
            self._directory.sent.discard(digest, self.bit)
        self._notes.clear()

    def forget(self) -> None:
        """Forget what was announced."""
        self._known = None
        self._announced.clear()

    @property
    def resume(self) -> tuple[bytes, int] | None:
        """The worker's process whose announcements are known, and up to which number; None if that is not all."""
        return None if self._known is None or self._has_gaps else (self._incarnation, self._known)

    def announce(self, announcement: Announcement) -> None:
        """Take in an announcement of the worker. Digests that are gone may have been forgotten here earlier."""
        if not self._is_open:
            raise ProtocolError(f"announcement {announcement.number} came outside of a session")
        if announcement.since is None:
            self.forget()
        elif self._known is None or not announcement.since <= self._known <= announcement.number:
            raise ProtocolError(
                f"an announcement from {announcement.since} to {announcement.number} came where {self._known} was known"
            )
        self._known, self._has_gaps = announcement.number, announcement.more
        for digest in announcement.gone:
            self._announced.drop(digest)
        if announcement.holdings:
            self._announced.update(announcement.holdings)

    # Knowledge.

    def holding(self, digest: Digest) -> FeatureInfo | None:
        """Return the announced feature info of a digest; None for a digest that is only noted as sent."""
        return self._announced.get(digest)

    def knows(self, digest: Digest) -> bool:
        """Return whether a request may refer to a digest without sending it: it is announced or noted as sent."""
        return digest in self._announced or digest in self._notes

    def lacking(self, digests: Iterable[Digest]) -> tuple[Digest, ...]:
        """Return the unknown digests, each once, in order: the result of `submit`, without its notes."""
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
        """Take a worker's request for digests. Returns those whose features must be obtained and then sent.

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
                    self._directory.sent.discard(digest, self.bit)
                    ended.append(digest)
        return tuple(ended)

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
                self._directory.sent.add(digest, self.bit)

    def _not_under_way(self, request: _Request, digests: Iterable[Digest]) -> tuple[Digest, ...]:
        """Return the digests that no other unsettled request has sent.

        The worker stores what a request has sent until that request ends there. So if the worker asks although a sender
        is unsettled, that transfer had not arrived when it asked. The transfer will then serve the asking request too.
        """
        return tuple(d for d in digests if self._notes.get(d, 0) <= (d in request.sent))
