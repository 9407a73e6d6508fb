"""Admission of connections, and eviction of some for the sake of others (threats S25). Pure.

A connection has a place from the moment it is accepted, before a byte of it is read. While a connection is silent (no
request has come yet) it can be closed for another: a client that means well sends its request at once. An idle one,
between two requests, is closed only for an address that has fewer connections. One that is being answered never is.

Beyond the limit a connection gets a reserved place, for a moment: probes are answered there, everything else is
refused with a reason. So a probe reaches a server that others have filled. Every call is O(1), however many addresses
there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, Final

from semel.fairness.shares import Shares

__all__ = ["EXPENDABLE", "REASONS", "Admission", "Place", "Stage", "mark_evictable"]

EXPENDABLE: Final = "semel.expendable"
"""The extension of a request's scope with which an application says that its connection may be closed for another."""

REASONS: Final = ("full", "address", "silent", "idle", "reserved", "late", "handshake")
"""Reasons for which a connection got no place, or lost it: the limit of all, or of its address; closed for another
while silent, idle, or in the reserve; no request, or no end of the handshake, in time.
"""


class Stage(Enum):
    """The state of a connection."""

    SILENT = "silent"
    """No request has come yet, or nothing but one without a valid key."""

    IDLE = "idle"
    """A request was answered, and the next has not come."""

    BUSY = "busy"
    """A request is being answered."""


EVICTABLE: Final = (Stage.SILENT, Stage.IDLE)


class Place:
    """The place of one connection."""

    __slots__ = ("_admission", "address", "is_reserved", "on_eviction", "stage")

    def __init__(self, admission: Admission, address: str, *, is_reserved: bool) -> None:
        self._admission = admission
        self.address = address
        self.is_reserved = is_reserved
        """True if only probes are answered here."""

        self.stage: Stage | None = Stage.SILENT
        """None when the place was given up."""

        self.on_eviction: Callable[[], None] = lambda: None
        """Closes the connection."""

    def enter(self, stage: Stage) -> None:
        """Change what the connection does from now on."""
        self._admission.move(self, stage)

    def release(self) -> None:
        """Release the place of a connection that is gone. Any number of times."""
        self._admission.move(self, None)

    def give_up(self, reason: str) -> None:
        """Close the connection, for one of the `REASONS`."""
        if self.stage is not None:
            self._admission.closed[reason] += 1
            self.release()


class Admission:
    """The places of all connections of a server."""

    def __init__(self, max_connections: int, *, reserve: int, max_per_address: int = 0) -> None:
        """`max_per_address` of 0 sets no limit."""
        self.shares = Shares(max_connections)
        """Connections by address, without the reserved ones."""

        self.reserve = reserve
        self.max_per_address = max_per_address
        self.closed: Counter[str] = Counter()
        """Connections that got no place, or lost it, by one of the `REASONS`."""

        self._evictable = {stage: _ConnectionsByAddress() for stage in EVICTABLE}
        self._reserved = _ConnectionsByAddress()
        self._busy = 0

    def __len__(self) -> int:
        """Count the connections, without the reserved ones."""
        return self.shares.total

    def __repr__(self) -> str:
        return f"Admission({self.shares!r}, {len(self._reserved)} reserved)"

    @property
    def is_full(self) -> bool:
        """True if another connection can only have the place of one that there is, or a reserved one."""
        return not self.shares.fits(1)

    def by_stage(self) -> Iterator[tuple[str, int]]:
        """Yield how many connections there are in each stage, and in the reserve."""
        for stage, connections in self._evictable.items():
            yield stage.value, len(connections)
        yield Stage.BUSY.value, self._busy
        yield "reserved", len(self._reserved)

    def open(self, address: str, *, is_proxy: bool = False) -> Place:
        """Return a place for a new connection from this address. It may cost another connection its place.

        A proxy has connections of many clients: it has no limit of its own.
        """
        count = self.shares[address]
        if self.max_per_address and count >= self.max_per_address and not is_proxy:
            reason, victim = "address", self._evictable[Stage.SILENT].oldest_of(address)
        elif self.is_full:
            reason, victim = "full", self._victim(address, count)
        else:
            return self._add(Place(self, address, is_reserved=False))
        if victim is None:
            self.closed[reason] += 1
            return self._open_reserved(address)
        self._evict(victim)
        return self._add(Place(self, address, is_reserved=False))

    def move(self, place: Place, stage: Stage | None) -> None:
        """Let a place have another stage, or none any more."""
        if place.stage is None or place.stage is stage:
            return
        self._leave(place)
        place.stage = stage
        if stage is None:
            if not place.is_reserved:
                self.shares.change(place.address, -1)
        else:
            self._insert(place)

    def _victim(self, address: str, count: int) -> Place | None:
        """Return the connection that is closed for one more from this address, which has `count`."""
        silent, idle = self._evictable[Stage.SILENT], self._evictable[Stage.IDLE]
        found = silent.oldest_of_largest()
        if found is not None and (found.address == address or self.shares[found.address] > count):
            return found
        if (own := silent.oldest_of(address)) is not None:
            return own
        found = idle.oldest_of_largest()
        # Of two addresses that have the same after it, the one that was there first keeps its connection.
        if found is not None and self.shares[found.address] > count + 1:
            return found
        return None

    def _open_reserved(self, address: str) -> Place:
        if len(self._reserved) >= self.reserve and (oldest := self._reserved.oldest_of_largest()) is not None:
            self._evict(oldest)
        place = Place(self, address, is_reserved=True)
        self._reserved.add(place)
        return place

    def _evict(self, place: Place) -> None:
        assert place.stage is not None
        self.closed["reserved" if place.is_reserved else place.stage.value] += 1
        place.release()
        place.on_eviction()

    def _add(self, place: Place) -> Place:
        self.shares.change(place.address, 1)
        self._insert(place)
        return place

    def _insert(self, place: Place) -> None:
        if place.is_reserved:
            self._reserved.add(place)
        elif place.stage is Stage.BUSY:
            self._busy += 1
        elif place.stage is not None:
            self._evictable[place.stage].add(place)

    def _leave(self, place: Place) -> None:
        if place.is_reserved:
            self._reserved.remove(place)
        elif place.stage is Stage.BUSY:
            self._busy -= 1
        elif place.stage is not None:
            self._evictable[place.stage].remove(place)


def mark_evictable(scope: Mapping[str, Any]) -> None:
    """Let the connection of a request be closed for another, also while it is answered: its client has no valid key."""
    if (extension := scope.get("extensions", {}).get(EXPENDABLE)) is not None:
        extension["give_up"]()


class _ConnectionsByAddress:
    """Places by address, and the addresses by how many they have."""

    def __init__(self) -> None:
        self._places: dict[str, dict[Place, None]] = {}
        self._addresses: dict[int, dict[str, None]] = {}
        """By number of places."""

        self._largest = 0
        self._total = 0

    def __len__(self) -> int:
        return self._total

    def add(self, place: Place) -> None:
        """Add a place, as the youngest of its address."""
        places = self._places.setdefault(place.address, {})
        places[place] = None
        self._total += 1
        self._resize(place.address, len(places) - 1, len(places))

    def remove(self, place: Place) -> None:
        """Remove a place."""
        places = self._places[place.address]
        del places[place]
        self._total -= 1
        self._resize(place.address, len(places) + 1, len(places))
        if not places:
            del self._places[place.address]

    def oldest_of(self, address: str) -> Place | None:
        """Return the oldest place of an address."""
        return next(iter(self._places.get(address, ())), None)

    def oldest_of_largest(self) -> Place | None:
        """The oldest place of the address that has the most; of several, the one that has had so many for longest."""
        address = next(iter(self._addresses.get(self._largest, ())), None)
        return None if address is None else self.oldest_of(address)

    def _resize(self, address: str, before: int, after: int) -> None:
        if before:
            same = self._addresses[before]
            del same[address]
            if not same:
                del self._addresses[before]
        if after:
            self._addresses.setdefault(after, {})[address] = None
        # Sizes change by one: if nobody has the largest any more, somebody has one less.
        self._largest = max(self._largest, after)
        if self._largest not in self._addresses:
            self._largest = max(self._largest - 1, 0)
