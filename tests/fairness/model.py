"""A slow and obviously right model of shares, claims, fair queueing, limits and fair eviction.

It has a list of all that tenants have or want, and looks at all of it for every decision. Where the rules leave a
choice between equal tenants, it names all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

__all__ = ["Counted", "Model", "Piece"]

ABOUT_S = 600.0


@dataclass(eq=False)
class Piece:
    """Something of a tenant: a claim, an entry of a cache, an item that waits or runs."""

    tenant: str
    amount: int = 1
    group: object = None
    can_go: bool = True
    """It can be called back, or evicted."""

    is_waiting: bool = False
    came: int = 0
    """The number of the event with which it came."""


@dataclass(eq=False)
class Counted:
    """What a tenant has used."""

    used: float = 0
    running: int = 0
    seen_s: float = 0.0
    rank: tuple[int, int] = (0, 0)
    """Of equal counters: those that began to wait, newest first, then those that had a turn, longest ago first."""


@dataclass
class Model:
    """All pieces, in the order in which they came or were used last."""

    capacity: int
    idle_s: float = ABOUT_S
    now_s: float = 0.0
    pieces: list[Piece] = field(default_factory=list)
    used_s: dict[str, float] = field(default_factory=dict)
    """When a tenant used something last, of those that have something."""

    counted: dict[str, Counted] = field(default_factory=dict)
    """The tenants that are about, of a queue."""

    turns: dict[tuple[str, object], int] = field(default_factory=dict)
    """The event with which a group began to wait, or had its last turn."""

    last: Counted | None = None
    events: int = 0

    # Shares and claims

    def amounts(self) -> Counter[str]:
        amounts: Counter[str] = Counter()
        for piece in self.pieces:
            amounts[piece.tenant] += piece.amount
        return +amounts

    def fits(self, amount: int) -> bool:
        return self.amounts().total() + amount <= self.capacity

    def share(self, tenant: str) -> int:
        return self.capacity // len({tenant, *self.amounts()})

    def goes(self, tenant: str) -> list[Piece]:
        """The pieces of a tenant that can go, oldest first."""
        return [piece for piece in self.pieces if piece.tenant == tenant and piece.can_go and piece.amount]

    def richest(self, tenant: str, least: float) -> list[str]:
        """Which others have the most, of those that have more than the least and have something that can go."""
        amounts = self.amounts()
        rich = {other: amounts[other] for other in amounts if other != tenant and self.goes(other)}
        return [other for other, amount in rich.items() if least < amount == max(rich.values())]

    def revoke(self, tenant: str, amount: int, choose: Callable[[list[Piece]], Piece]) -> list[Piece] | None:
        """Call back the newest claims of whoever has the most, until it fits; None, and none, if it never does."""
        before, revoked, share = list(self.pieces), list[Piece](), self.share(tenant)
        if not self.fits(amount) and self.amounts()[tenant] + amount > share:
            return None
        while not self.fits(amount):
            if not (rich := self.richest(tenant, share)):
                self.pieces = before
                return None
            revoked.append(choose([self.goes(other)[-1] for other in rich]))
            self.pieces.remove(revoked[-1])
        return revoked

    def yielding(self, tenant: str) -> list[Piece]:
        """Which items may have to yield their place in a full queue: the newest of whoever has the most."""
        if self.amounts()[tenant] + 1 > self.share(tenant):
            return []
        return [max(self.goes(other), key=lambda piece: piece.came) for other in self.richest(tenant, 0)]

    # Fair eviction

    def use(self, piece: Piece) -> None:
        self.pieces.remove(piece)
        self.pieces.append(piece)
        self.used_s[piece.tenant] = self.now_s

    def put(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.used_s[piece.tenant] = self.now_s

    def drop(self, piece: Piece) -> None:
        self.pieces.remove(piece)
        self.used_s = {tenant: self.used_s[tenant] for tenant in self.amounts()}

    def is_idle(self, tenant: str) -> bool:
        return self.now_s - self.used_s[tenant] > self.idle_s

    def can_have(self, tenant: str, amount: int) -> bool:
        """Within a share always; above that, if everybody else who asks can have as much."""
        asking = [its for other, its in self.amounts().items() if other != tenant and not self.is_idle(other)]
        return amount <= self.share(tenant) or amount + sum(min(its, amount) for its in asking) <= self.capacity

    def victims(self, tenant: str, amount: int) -> list[Piece]:
        """What may go next: of whoever is idle longest, else of whoever has the most and too much, else its own."""
        idle = [one for one in self.used_s if one != tenant and self.is_idle(one) and self.goes(one)]
        longest = [one for one in idle if self.used_s[one] == min(map(self.used_s.__getitem__, idle))]
        rich = self.richest(tenant, max(self.amounts()[tenant] + amount, self.share(tenant)))
        return [self.goes(one)[0] for one in longest or rich or [tenant] if self.goes(one)]

    def protected(self, tenant: str, amount: int) -> list[Piece]:
        """What does not go, whatever else a tenant wants so much for."""
        amounts, limit = self.amounts(), max(amount, self.share(tenant))
        entitled = [one for one in amounts if one != tenant and not self.is_idle(one) and amounts[one] <= limit]
        return [piece for one in entitled for piece in self.goes(one)]

    # Fair queueing

    def waiting(self, tenant: str) -> list[Piece]:
        return [piece for piece in self.pieces if piece.tenant == tenant and piece.is_waiting]

    def wait(self, piece: Piece) -> None:
        """A piece begins to wait: a tenant that begins to wait is lifted to the least of those that do."""
        self.events += 1
        tenant = self.counted.setdefault(piece.tenant, Counted())
        tenant.seen_s = self.now_s
        for name, other in list(self.counted.items()):
            if other.seen_s < self.now_s - ABOUT_S:
                other.seen_s = self.now_s
                if not self.waiting(name) and not other.running:
                    del self.counted[name]
        if not self.waiting(piece.tenant):
            others = [self.counted[name] for name in self.names_waiting()] or [self.last or Counted()]
            tenant.used = max(tenant.used, min(other.used for other in others))
            tenant.rank = (0, -self.events)
        self.turns.setdefault((piece.tenant, piece.group), self.events)
        piece.is_waiting, piece.came = True, self.events
        self.pieces.append(piece)

    def names_waiting(self) -> list[str]:
        return sorted({piece.tenant for piece in self.pieces if piece.is_waiting})

    def order(self) -> list[str]:
        """The tenants that wait, in the order of their turns."""
        return sorted(self.names_waiting(), key=lambda name: (self.counted[name].used, self.counted[name].rank))

    def next_of(self, tenant: str, priority: Callable[[Piece], int] = lambda _: 0) -> Piece:
        waiting = self.waiting(tenant)
        return min(waiting, key=lambda one: (priority(one), self.turns[tenant, one.group], one.came))

    def take(self, piece: Piece) -> None:
        """A piece waits no more, and its tenant and its group have had their turn."""
        self.events += 1
        self.last = self.counted[piece.tenant]
        self.last.rank = (1, self.events)
        self.turns[piece.tenant, piece.group] = self.events
        self.leave(piece)

    def leave(self, piece: Piece) -> None:
        self.pieces.remove(piece)
        piece.is_waiting = False
        left = {(one.tenant, one.group) for one in self.pieces if one.is_waiting}
        self.turns = {group: event for group, event in self.turns.items() if group in left}

    # Limits

    def serve(self, waiting: Iterable[Piece], limit: int) -> None:
        """Let those begin, in order, that fit under the limit of their own tenant, or are alone there."""
        blocked: set[str] = set()
        for piece in waiting:
            held = sum(one.amount for one in self.pieces if one.tenant == piece.tenant and not one.is_waiting)
            if piece.tenant in blocked or (held and held + piece.amount > limit):
                blocked.add(piece.tenant)
            else:
                piece.is_waiting = False
