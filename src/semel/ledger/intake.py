"""The intake: submissions on their way into the engine, and the features that they wait for or use (D1, D3).

A feature is stored exactly as long as an open request uses it, once for all of them. A digest is expected exactly as
long as an open request waits for it. So nothing remains when all requests are closed. A request retains the features
that arrived for it until it is closed, and it asks for a digest at most once: it needs at most as many rounds as it has
distinct digests.

A request may wait for a digest without asking if another submission of the same session *promised* it as its payload.
The frontend withdraws a transfer only when no unsettled request of its own refers to the digest. So the promise
outlives the request that made it, while another submitted request waits for the digest. A digest that another request
only *asked* for is not promised: that request may be aborted before its question arrives. Both requests then ask, and
the frontend sends the feature once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from semel.core import Digest, Feature
from semel.errors import EngineFailed, ProtocolError

__all__ = ["Intake", "Opened"]

_P = TypeVar("_P", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Opened:
    """The state of a request after it is opened."""

    needed: tuple[Digest, ...]
    """Digests to request from the frontend."""

    is_ready: bool
    """True if the request waits for nothing."""


@dataclass(slots=True)
class _Request:
    digests: frozenset[Digest]
    is_unsettled: bool
    """True if the frontend counts the request among those that rely on transfers of others."""
    features: dict[Digest, Feature] = field(default_factory=dict)
    awaited: set[Digest] = field(default_factory=set)


@dataclass(slots=True)
class _Session:
    """The open requests of one peer."""

    requests: dict[str, _Request] = field(default_factory=dict)
    awaited: dict[Digest, dict[str, None]] = field(default_factory=dict)
    """By digest, the requests that wait for it, in order."""
    promised: set[Digest] = field(default_factory=set)
    """The awaited digests that arrive without being asked for."""


@dataclass(slots=True)
class _AtHand:
    feature: Feature
    pins: int = 0


class Intake(Generic[_P]):
    """The open requests of all sessions. A peer is any hashable value that identifies a session."""

    def __init__(self) -> None:
        self.nbytes = 0
        """Bytes of the stored features, each counted once."""
        self.waiting = 0
        """Number of requests that wait for a feature."""
        self._sessions: dict[_P, _Session] = {}
        self._at_hand: dict[Digest, _AtHand] = {}

    def __len__(self) -> int:
        """Number of open requests."""
        return sum(len(session.requests) for session in self._sessions.values())

    def open(
        self,
        peer: _P,
        request_id: str,
        digests: Iterable[Digest],
        payloads: Iterable[Digest],
        holds: Callable[[Digest], bool],
    ) -> Opened:
        """Open a submission. `payloads` are the digests whose features follow it.

        A digest that the engine has needs nothing. A stored feature is used, and a promised one is awaited. The rest
        must be requested. A payload that the request does not use is refused: no request would wait for it.
        """
        distinct, promised = dict.fromkeys(digests), dict.fromkeys(payloads)
        if unused := promised.keys() - distinct.keys():
            raise ProtocolError(f"request {request_id} sends {len(unused)} features that it does not use")
        session, request = self._admit(peer, request_id, _Request(frozenset(distinct), is_unsettled=True))
        for digest in promised:
            self._await(session, request_id, request, digest)
        session.promised.update(promised)
        rest = (digest for digest in distinct if digest not in promised and not holds(digest))
        return Opened(self._obtain(session, request_id, request, rest), not request.awaited)

    def reopen(self, peer: _P, request_id: str, digests: Iterable[Digest], missing: Iterable[Digest]) -> Opened:
        """Open a request again after the engine accepted it and then missed some of its items.

        The frontend has settled it and no longer counts it among the requests that rely on a promise. So it asks for
        everything that is not stored.
        """
        session, request = self._admit(peer, request_id, _Request(frozenset(digests), is_unsettled=False))
        return Opened(self._obtain(session, request_id, request, dict.fromkeys(missing)), not request.awaited)

    def arrive(self, peer: _P, digest: Digest, feature: Feature) -> list[str]:
        """Give a feature to all requests of the peer that wait for it. Returns those that are now ready, in order.

        A feature that no request waits for is dropped: its request was aborted, or it arrived twice.
        """
        session = self._sessions.get(peer)
        if session is None:
            return []
        session.promised.discard(digest)
        ready = []
        for request_id in session.awaited.pop(digest, ()):
            request = session.requests[request_id]
            request.awaited.remove(digest)
            self._pin(request, digest, feature)
            if not request.awaited:
                self.waiting -= 1
                ready.append(request_id)
        return ready

    def features(self, peer: _P, request_id: str) -> Mapping[Digest, Feature]:
        """Return the features to pass to the engine with a request; the engine has the others."""
        return self._sessions[peer].requests[request_id].features

    def missing(self, peer: _P, request_id: str, digests: Iterable[Digest]) -> tuple[Digest, ...]:
        """Record that the engine lacks these items after all. Returns the digests to request.

        The request waits again, unless all these features are stored. Returns nothing for a request that was closed
        meanwhile. An engine that lacks a feature that it received has failed.
        """
        session = self._sessions.get(peer)
        request = None if session is None else session.requests.get(request_id)
        if session is None or request is None:
            return ()
        lacking = dict.fromkeys(digests)
        if not lacking or lacking.keys() & request.features.keys() or lacking.keys() - request.digests:
            raise EngineFailed(
                f"the engine misses {len(lacking)} features of request {request_id}, not only ones it was to hold"
            )
        return self._obtain(session, request_id, request, lacking)

    def is_ready(self, peer: _P, request_id: str) -> bool:
        """Return whether a request is open and waits for nothing."""
        session = self._sessions.get(peer)
        request = None if session is None else session.requests.get(request_id)
        return request is not None and not request.awaited

    def close(self, peer: _P, request_id: str) -> bool:
        """Close a request that was submitted, failed or was aborted. Returns whether it was open.

        The message to the frontend, or from it, belongs to the same step: the frontend draws conclusions from messages
        that have not arrived yet.
        """
        session = self._sessions.get(peer)
        request = None if session is None else session.requests.pop(request_id, None)
        if session is None or request is None:
            return False
        self.waiting -= bool(request.awaited)
        for digest in request.awaited:
            self._cease(session, request_id, digest)
        self._unpin(request)
        if not session.requests:
            del self._sessions[peer]
        return True

    def forget(self, peer: _P) -> None:
        """Close all requests of a session that ended."""
        session = self._sessions.pop(peer, None)
        for request in session.requests.values() if session else ():
            self.waiting -= bool(request.awaited)
            self._unpin(request)

    def _admit(self, peer: _P, request_id: str, request: _Request) -> tuple[_Session, _Request]:
        session = self._sessions.get(peer)
        if session is None:
            session = self._sessions[peer] = _Session()
        elif request_id in session.requests:
            raise ProtocolError(f"request {request_id} was submitted twice")
        session.requests[request_id] = request
        return session, request

    def _obtain(
        self, session: _Session, request_id: str, request: _Request, digests: Iterable[Digest]
    ) -> tuple[Digest, ...]:
        """Use the stored features and wait for the others. Returns the digests to request."""
        needed = []
        for digest in digests:
            if (at_hand := self._at_hand.get(digest)) is not None:
                self._pin(request, digest, at_hand.feature)
                continue
            if not (request.is_unsettled and digest in session.promised):
                needed.append(digest)
            self._await(session, request_id, request, digest)
        return tuple(needed)

    def _await(self, session: _Session, request_id: str, request: _Request, digest: Digest) -> None:
        self.waiting += not request.awaited
        request.awaited.add(digest)
        session.awaited.setdefault(digest, {})[request_id] = None

    def _cease(self, session: _Session, request_id: str, digest: Digest) -> None:
        waiting = session.awaited[digest]
        del waiting[request_id]
        if not any(session.requests[other].is_unsettled for other in waiting):
            session.promised.discard(digest)
        if not waiting:
            del session.awaited[digest]

    def _pin(self, request: _Request, digest: Digest, feature: Feature) -> None:
        at_hand = self._at_hand.get(digest)
        if at_hand is None:
            at_hand = self._at_hand[digest] = _AtHand(feature)
            self.nbytes += feature.nbytes
        at_hand.pins += 1
        request.features[digest] = at_hand.feature

    def _unpin(self, request: _Request) -> None:
        for digest in request.features:
            at_hand = self._at_hand[digest]
            at_hand.pins -= 1
            if not at_hand.pins:
                del self._at_hand[digest]
                self.nbytes -= at_hand.feature.nbytes
