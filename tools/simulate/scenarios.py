"""`python -m tools.simulate.scenarios [SEEDS]`: what balancing must keep to in a fleet of 100, next to the old rule.

The workload is that of docs/operate/scale.md: conversations of about six turns, eight seconds apart, with images
of one size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from semel.fleet.balance import Balance
from semel.fleet.ejection import OutlierEjection
from semel.lab.simulate.decisions import Decisions, Sizes
from semel.lab.simulate.engine import EngineLimits
from semel.lab.simulate.faults import Broken, Join
from semel.lab.simulate.view import name_of
from semel.lab.simulate.workload import Chats, Talks, Traffic

WORKERS = 100
MAX_HOLE, MAX_JOINER, MAX_ENCODES = 0.03, 5, 1.12
_SIZE = (1024, 1024)


class LeastBusyBound(Balance):
    """The old rule: the bound stands over the least busy worker of all."""

    def _bounds(self, among: int) -> tuple[float, float]:
        number = among.bit_count()
        total = sum(load * (workers & among).bit_count() for load, workers in self._levels.items())
        least = next(load for load in self._order if self._levels[load] & among)
        bound = least + 3 + 0.1 * total / number
        return bound, bound + min(0.4 * total / number, 2)


@contextmanager
def unjudged() -> Iterator[None]:
    """As it was before ejection: failures tell nothing of a worker."""
    with (
        patch.object(OutlierEjection, "charge", lambda *_: None),
        patch.object(OutlierEjection, "fail", lambda *_: 0.0),
    ):
        yield


def hole_share(seed: int, balance: type[Balance] = Balance, *, workers: int = WORKERS, seconds: float = 20.0) -> float:
    """Return the share of all requests that a worker gets which fails each at once, from the second second on."""
    workload = Talks(Chats(size=_SIZE), Traffic(3.6 * workers, seconds))
    faults = [Broken(2.0, 7, 1e6)]
    figures = Decisions(Sizes(workers, workers), workload, seed=seed, faults=faults, balance=balance).run()
    assert figures.answered + figures.refused == figures.requests
    return figures.by_worker[name_of(7)] / sum(figures.by_worker.values())


def joiner_requests(seed: int, balance: type[Balance] = Balance, *, workers: int = WORKERS) -> int:
    """Return the requests that a worker gets in its first 100 ms, when the others have about 18 each."""
    at_s = 14.0
    traffic = Traffic(3.0 * workers, at_s + 1.0, answer_tokens=300)
    fleet = Decisions(
        Sizes(workers, workers), Talks(Chats(size=_SIZE), traffic), seed=seed, faults=[Join(at_s)], balance=balance
    )
    fleet.run_until(at_s + 0.1)
    return fleet.figures.by_worker[name_of(workers)]


def encodes_per_item(
    seed: int, balance: type[Balance] = Balance, *, workers: int = WORKERS, rate: float = 2.0, seconds: float = 30.0
) -> float:
    """Return how often an image is encoded, if encoder outputs are kept: what is left is due to where requests go.

    It grows with the load, and with the time: conversations become longer, and one that moves takes all its images.
    """
    workload = Talks(Chats(size=_SIZE), Traffic(rate * workers, seconds))
    sizes = Sizes(workers, workers, engine=EngineLimits(encoder_embeds=1 << 20))
    figures = Decisions(sizes, workload, seed=seed, balance=balance).run()
    assert figures.answered == figures.requests
    return figures.encodes / figures.distinct_items


def main(seeds: int = 6) -> None:
    out = sys.stdout.write
    out(f"{WORKERS} workers, {WORKERS} frontends, {seeds} seeds: mean (lowest, highest)\n\n")
    out("| what | shipped | limit | bound over the least |\n|---|---|---|---|\n")
    for what, limit, measure in (
        ("share of one broken worker", MAX_HOLE, hole_share),
        ("requests of a joiner in 100 ms", MAX_JOINER, joiner_requests),
        ("encodes per image", MAX_ENCODES, encodes_per_item),
    ):
        shipped = [measure(seed) for seed in range(seeds)]
        with unjudged():
            old = [measure(seed, LeastBusyBound) for seed in range(seeds)]
        out(f"| {what} | {_series(shipped)} | {limit:g} | {_series(old)} |\n")
        sys.stdout.flush()


def _series(values: list[float] | list[int]) -> str:
    return f"{sum(values) / len(values):.3f} ({min(values):.3f}, {max(values):.3f})"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
