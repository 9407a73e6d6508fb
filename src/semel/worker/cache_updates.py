"""Updates of a worker to its frontends: the load of its engine, and the items that it stored and evicted. Pure.

The frontend of a request gets them at once: it knows what happened to the items that it sent before it reads that its
request was accepted. The others get them in rounds, at most one per `announce_interval_s`, and only changes. Frontends
in the same state get the same message, which is packed once for all of them. An only frontend knows the load, which is
its own: it gets no message for that alone, unless it was last told of more, or another has just left. Callers pass
the time.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from math import inf
from typing import Final, Generic, NamedTuple, TypeVar

from semel.core import Digest, FeatureInfo
from semel.ledger import Announcement, Holdings

__all__ = ["CacheUpdates", "Load", "StateDelta"]

_P = TypeVar("_P", bound=Hashable)

_GATHER_S: Final = 0.005
"""Seconds that a round waits for more when something changes after a while."""

_FEW_PEERS: Final = 4
_FEW_PEERS_S: Final = 0.02
"""Between two rounds with only a few peers: they cost little."""

_PEERS_PER_TURN: Final = 100
"""Peers that get updates at a time, before other work runs: about 2 ms."""


class Load(NamedTuple):
    """Requests that a worker has."""

    running: int = 0
    waiting: int = 0
    """For their features."""

    is_paused: bool = False
    """True if the engine makes no steps on purpose."""

    @property
    def requests(self) -> int:
        """All of them."""
        return self.running + self.waiting


_UNKNOWN: Final = Load(sys.maxsize)
"""The load of a peer that is told every other one."""


@dataclass(frozen=True, slots=True)
class StateDelta(Generic[_P]):
    """An update for some peers."""

    announcement: Announcement
    load: Load
    peers: tuple[_P, ...]


class CacheUpdates(Generic[_P]):
    """The updates that each peer lacks, and their times. A peer is any hashable value that identifies a session."""

    def __init__(self, announce_interval_s: float = 0.25, holdings: Holdings[_P] | None = None) -> None:
        self.holdings: Holdings[_P] = Holdings() if holdings is None else holdings
        self._announce_interval_s = announce_interval_s
        self._load = Load()
        self._loads: dict[_P, Load] = {}
        """The load that each peer has last heard of."""

        self._round: deque[_P] = deque()
        """The peers that have not had their turn in this round."""

        self._last_round = self._changed = -inf
        self._has_changed = False
        """True if anything has changed since the last round began."""

    @property
    def due(self) -> float:
        """The time for `next_turn`; infinity if there are no updates."""
        if self._round:
            return self._last_round
        return max(self._changed + _GATHER_S, self._last_round + self.interval_s) if self._has_changed else inf

    @property
    def interval_s(self) -> float:
        """Between two rounds, at the least."""
        return (
            min(self._announce_interval_s, _FEW_PEERS_S)
            if len(self._loads) <= _FEW_PEERS
            else self._announce_interval_s
        )

    # What changes.

    def hold(self, digest: Digest, holding: FeatureInfo, now: float) -> None:
        """Add a feature that the engine has stored."""
        self.holdings.hold(digest, holding)
        self._note_change(now)

    def drop(self, digest: Digest, now: float) -> None:
        """Remove a feature that the engine has evicted."""
        self.holdings.drop(digest)
        self._note_change(now)

    def set_load(self, load: Load, now: float) -> None:
        """Set the load of the engine."""
        if load == self._load:
            return
        is_known = load.is_paused == self._load.is_paused
        self._load = load
        if is_known and len(self._loads) == 1 and load.requests >= max(one.requests for one in self._loads.values()):
            return
        self._note_change(now)

    # Peers.

    def join(self, peer: _P, known: int | None = None) -> list[StateDelta[_P]]:
        """Begin a session with a peer that knows everything up to a number, or nothing. Returns its first updates;
        the rest of a snapshot is for `next_slice`."""
        self._loads[peer] = self._load
        return self._to(peer, self.holdings.join(peer, known))

    def leave(self, peer: _P) -> None:
        """End the session of a peer, if there is one."""
        self.holdings.leave(peer)
        if self._loads.pop(peer, None) is not None and len(self._loads) == 1:
            # What it was last told may be the other's load: it is told the next one, whatever that is.
            self._loads = dict.fromkeys(self._loads, _UNKNOWN)

    def next_slice(self, peer: _P) -> StateDelta[_P] | None:
        """Return the next slice of all items, for a peer that has read the one before; None after the last."""
        if peer not in self._loads or (announcement := self.holdings.next_slice(peer)) is None:
            return None
        return StateDelta(announcement, self._load, (peer,))

    def concerning(self, peer: _P) -> list[StateDelta[_P]]:
        """Return the updates for a peer before a message about its request."""
        return self._to(peer, self.holdings.changes(peer)) if peer in self._loads else []

    def next_turn(self, now: float) -> list[StateDelta[_P]]:
        """Return the updates for the next peers of a round."""
        if not self._round:
            self._last_round, self._has_changed = now, False
            self._round.extend(self._loads)
        self.holdings.number_changes()
        return self._tell([self._round.popleft() for _ in range(min(_PEERS_PER_TURN, len(self._round)))])

    def publish(self, now: float) -> list[StateDelta[_P]]:
        """Return the updates for all peers now."""
        self._round.clear()
        self._last_round, self._has_changed = now, False
        self.holdings.number_changes()
        return self._tell(list(self._loads))

    def _tell(self, peers: list[_P]) -> list[StateDelta[_P]]:
        groups: dict[tuple[int, bool], list[_P]] = {}
        for peer in peers:
            if (sent := self._loads.get(peer)) is not None:
                state = self.holdings.known(peer)
                if sent != self._load or state[0] != self.holdings.number:
                    groups.setdefault(state, []).append(peer)
                    self._loads[peer] = self._load
        return [
            StateDelta(announcement, self._load, tuple(group))
            for (known, more), group in groups.items()
            for announcement in self.holdings.catch_up(group) or [Announcement(known, known, more=more)]
        ]

    def _to(self, peer: _P, announcements: list[Announcement]) -> list[StateDelta[_P]]:
        if announcements:
            self._loads[peer] = self._load
        return [StateDelta(announcement, self._load, (peer,)) for announcement in announcements]

    def _note_change(self, now: float) -> None:
        if not self._has_changed:
            self._has_changed, self._changed = True, now
