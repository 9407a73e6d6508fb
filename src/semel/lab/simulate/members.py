"""Parts of a simulated fleet of decisions: its sizes, a worker, a request, and cells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final, Literal

from semel.core import Digest, LruMap, Placeholder
from semel.core.rendezvous import rank
from semel.fleet.ejection import Attempt, OutlierEjection
from semel.fleet.retry_policy import FleetHealth, RetryPolicy
from semel.lab.simulate.batches import Batches
from semel.lab.simulate.engine import EngineLimits
from semel.lab.simulate.view import FrontendView, Link, name_of
from semel.lab.simulate.workload import Ask, Item, Workload, digest_of

__all__ = [
    "AT_ONCE_S",
    "CellBy",
    "CellWorkload",
    "ModelledRequest",
    "ModelledWorker",
    "Remakes",
    "SilentHealth",
    "Sizes",
    "sizes_of_cells",
]

AT_ONCE_S: Final = 0.02
"""With updates as often as this, workers tell everybody of items as soon as they have them."""

_CLAIM_S: Final = 0.25
"""For work that takes less, waiting for somebody else who does it does not pay."""

_FEW_FRONTENDS: Final = 4
_ANNOUNCE_INTERVAL_S: Final = 0.25


@dataclass(frozen=True)
class Sizes:
    """The fleet."""

    frontends: int
    workers: int
    processes: int = 4
    """Of a frontend's pool."""

    feature_cache_bytes: int = 1 << 30
    announce_interval_s: float | None = None
    """How often workers tell everybody what has changed; by default as shipped."""

    eject_after: int = 3
    engine: EngineLimits = field(default_factory=EngineLimits)

    @property
    def interval_s(self) -> float:
        """Return how often workers tell everybody."""
        return self.announce_interval_s or (AT_ONCE_S if self.frontends <= _FEW_FRONTENDS else _ANNOUNCE_INTERVAL_S)


class ModelledWorker:
    """An engine with its item cache, and the network before it."""

    def __init__(self, number: int, phase_s: float, item_bytes: int) -> None:
        self.number = number
        self.name = name_of(number)
        self.phase_s = phase_s
        self.items: LruMap[Digest, Item] = LruMap(item_bytes, lambda item: item.nbytes)
        self.requests: dict[ModelledRequest, None] = {}
        """That were sent to it and are not answered."""

        self.arriving: dict[Digest, float] = {}
        """When features that are on their way will be there."""

        self.link_free_s = 0.0
        self.is_broken = self.telling = False
        self.sessions = 0
        self.batches: Batches


class ModelledRequest:
    """A request, from its client to its answer."""

    __slots__ = (
        "ask",
        "begun",
        "brought",
        "digests",
        "frontend",
        "is_arriving",
        "keys",
        "link",
        "places",
        "policy",
        "prefix",
        "worker",
    )

    def __init__(self, ask: Ask, frontend: FrontendView, places: Sequence[Placeholder]) -> None:
        self.ask = ask
        self.places = places
        """Where its items are in the prompt."""

        self.frontend = frontend
        self.keys = [digest_of(ask.tenant, item.key) for item in ask.items]
        self.digests = dict(zip(self.keys, ask.items, strict=True))
        """Its distinct items."""

        self.prefix = digest_of(ask.tenant, -1 - ask.conversation)[:16]
        self.brought: tuple[Digest, ...] = ()
        """Those whose features it sends."""

        self.is_arriving = False
        """Whether these are on their way."""

        self.begun = False
        self.policy: RetryPolicy | None = None
        self.worker: ModelledWorker
        self.link: Link

    def arrive(self) -> None:
        """Note that its data is there, or never will be."""
        if self.is_arriving:
            self.is_arriving = False
            self.link.sent.end(self.brought)


class SilentHealth(FleetHealth):
    """Logs nothing: hundreds of frontends would say the same."""

    def succeed(self, attempt: Attempt) -> bool:
        """It was answered."""
        return OutlierEjection.succeed(self, attempt)

    def fail(self, attempt: Attempt) -> float:
        """Its worker was at fault."""
        return OutlierEjection.fail(self, attempt)


class Remakes:
    """Features that a frontend makes although another one has, or does at that moment, which claims would spare."""

    def __init__(self, counts: dict[str, float]) -> None:
        self._counts = counts
        self._made: dict[Digest, float] = {}

    def add(self, digest: Digest, now: float, ready_s: float, seconds: float) -> None:
        """A frontend begins to make a feature, which will be ready then and takes so long."""
        made_s = self._made.get(digest)
        self._made[digest] = max(ready_s, made_s or 0.0)
        if made_s is None:
            return
        at_once = now < made_s
        self._count("made_again", 1, at_once)
        self._count("made_again_s", seconds, at_once)
        if seconds > _CLAIM_S:
            self._count("made_again_over_250_ms", 1, at_once)

    def _count(self, name: str, amount: float, at_once: bool) -> None:
        for one in (name, f"{name}_at_once") if at_once else (name,):
            self._counts[one] = self._counts.get(one, 0) + amount


CellBy = Literal["tenant", "conversation"]


@dataclass(frozen=True)
class CellWorkload:
    """The part of a workload that one cell gets."""

    workload: Workload
    cell: int
    cells: int
    by: CellBy = "tenant"

    def asks(self, rng: Random) -> Iterator[Ask]:
        """Yield its requests, in order of time."""
        known: dict[str, bool] = {}
        for ask in self.workload.asks(rng):
            key = ask.tenant if self.by == "tenant" else str(ask.conversation)
            if (is_ours := known.get(key)) is None:
                is_ours = known[key] = self._is_ours(key)
            if is_ours:
                yield ask

    def _is_ours(self, key: str) -> bool:
        return max(range(self.cells), key=lambda cell: rank(f"cell-{cell}", key.encode()[:64])) == self.cell


def sizes_of_cells(sizes: Sizes, cells: int) -> list[Sizes]:
    """Return the fleet in so many parts, as equal as possible."""

    def part(total: int, cell: int) -> int:
        return total // cells + (cell < total % cells)

    return [
        replace(sizes, frontends=part(sizes.frontends, cell), workers=part(sizes.workers, cell))
        for cell in range(cells)
    ]
