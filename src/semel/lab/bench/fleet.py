"""`semel bench fleet`: what a large fleet costs a frontend and a worker, in one process and without an engine.

Sizes of images are like those that users send: half are common sizes of screens, cameras and squares, half are any
size from 200 to 2,000 pixels; tokens are those of Qwen2-VL. Times are the processor's. The baseline of a choice is
asking the ledgers of all workers one by one.
"""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from random import Random
from statistics import median
from time import thread_time
from typing import Final, TypeVar

from semel.core import Digest, FeatureInfo, Layout
from semel.fleet.balance import Balance
from semel.fleet.ejection import EjectionLimits, OutlierEjection
from semel.fleet.fleet import Fleet
from semel.fleet.retry_policy import FleetHealth
from semel.fleet.worker import RemoteWorker
from semel.lab.bench.fleet_sessions import BENCH_CONTRACT, BENCH_KEY, measure_sessions
from semel.lab.bench.image_sizes import draw_size, tokens_of
from semel.lab.bench.report import Check, Report, describe_machine
from semel.lab.bench.settings import FleetOptions
from semel.lab.bench.timing import without_garbage_collection
from semel.ledger import Announcement, Directory, Holdings, Ledger
from semel.wire.codec import FROM_WORKER, decode, encode, pack
from semel.wire.limits import Limits
from semel.wire.messages import Status
from semel.wire.translation import to_announcement, to_status
from semel.wire.zmq import FrontendLink

__all__ = ["run", "user_like"]

Tell = Callable[[str], None]
_T = TypeVar("_T")

_ITEMS: Final = 640
_CHOSEN_ITEMS: Final = 50
_MAX_CHOICE_US: Final = 30.0
_MAX_NEW_KEY_MS: Final = 2.0
_MAX_ITEM_BYTES: Final = 200.0
_MAX_READ_MS: Final = 3.0
_MANY_ITEMS: Final = 6_400
_CHANGES: Final = 4
"""Items that a worker stores in a second, and as many that it evicts: 10 requests, of which 4 show something new."""

_MAX_RESUMED: Final = 1.0
_QUICK_SESSIONS: Final = 50
_QUICK_ITEMS: Final = 640

_TOKEN: Final = 151_655
_TOKEN_BYTES: Final = 4 * 1_176 * 2


def run(*, options: FleetOptions | None = None, quick: bool = False, tell: Tell | None = None) -> Report:
    """Measure the parts, and then the sessions."""
    options, tell = options or FleetOptions(), tell or (lambda _: None)
    if quick:
        sessions, items = min(options.sessions, _QUICK_SESSIONS), min(options.items, _QUICK_ITEMS)
        options = FleetOptions(options.workers, sessions, items, min(options.seconds, 3.0))
    tell("choosing")
    rounds = 50 if quick else 300
    checks = [*_choosing(options.workers, rounds=rounds), _choosing_with_one_ejected(options.workers, rounds=rounds)]
    tell("ledgers")
    checks += _ledgers()
    tell("sessions")
    checks += measure_sessions(options, user_like(options.items), tell)
    return Report("fleet", describe_machine(), tuple(checks))


def user_like(count: int, seed: int = 1) -> dict[Digest, FeatureInfo]:
    """Items with images of the sizes that users send."""
    random = Random(seed)
    items = {}
    for _ in range(count):
        tokens = tokens_of(*draw_size(random))
        items[Digest(random.randbytes(Digest.size))] = FeatureInfo(
            "image", _TOKEN_BYTES * tokens, Layout((_TOKEN,) * tokens)
        )
    return items


def _choosing(workers: int, *, rounds: int) -> Iterator[Check]:
    random = Random(2)
    directory, balance = Directory(), Balance()
    ledgers = [Ledger(directory) for _ in range(workers)]
    announced, info = (
        [Digest(random.randbytes(Digest.size)) for _ in range(_CHOSEN_ITEMS)],
        next(iter(user_like(1).values())),
    )
    for ledger in ledgers:
        ledger.open()
        balance.put(ledger.number, f"tcp://10.0.0.{ledger.number}:9000", random.randint(0, 12))
    ledgers[-1].announce(Announcement(None, 0, holdings=dict.fromkeys(announced, info)))
    everybody = (1 << workers) - 1

    def choose(digests: list[Digest], prefix: bytes = b"a conversation") -> float:
        began = thread_time()
        balance.choose(everybody, digests, directory.holders(digests), prefix)
        return thread_time() - began

    def scan() -> float:
        began = thread_time()
        for ledger in ledgers:
            sum(map(ledger.knows, announced))
        return thread_time() - began

    with without_garbage_collection():
        scanned = median(scan() for _ in range(5)) * 1e6
        many = median(choose(announced) for _ in range(rounds)) * 1e6
        one = median(choose(announced[:1]) for _ in range(rounds)) * 1e6
        new = [Digest(os.urandom(Digest.size)) for _ in range(max(10, rounds // 10))]
        first = median(choose([digest]) for digest in new) * 1e3
        again = median(choose([digest]) for digest in new) * 1e6
    among = f"among {workers:,} workers"
    yield Check.at_most(
        f"choosing {among}, {_CHOSEN_ITEMS} items held", many, _MAX_CHOICE_US, unit="µs", baseline=scanned
    )
    yield Check(f"choosing {among}, 1 item held", one, "µs")
    yield Check.at_most(f"choosing {among}, a new item", first, _MAX_NEW_KEY_MS, unit="ms")
    yield Check(f"choosing {among}, the same item again", again, "µs")


class _Worker(RemoteWorker):
    """One that serves, without a link, and holds what it is made with."""

    def __init__(self, number: int, holdings: Mapping[Digest, FeatureInfo]) -> None:
        super().__init__(FrontendLink(f"tcp://10.0.0.{number}:9000", key=BENCH_KEY, frontend_id="bench"))
        self._contract = BENCH_CONTRACT
        self._ledger.open()
        self._ledger.announce(Announcement(None, 0, holdings=holdings))


class _OneEjected(FleetHealth):
    """The health of a fleet of which a worker has just failed."""

    def __init__(self, worker: str) -> None:
        super().__init__(EjectionLimits(1), now=lambda: 0.0)
        OutlierEjection.fail(self, self.begin(worker))


def _choosing_with_one_ejected(workers: int, *, rounds: int) -> Check:
    """Measure the whole of a frontend's choice, while a worker gets no requests because it fails."""
    items = user_like(1)
    fleet_workers = [_Worker(number, items if number == workers - 1 else {}) for number in range(workers)]
    fleet = Fleet(fleet_workers, health=_OneEjected(fleet_workers[0].name))

    def choose() -> float:
        began = thread_time()
        fleet.choose(items, prefix=b"a conversation")
        return thread_time() - began

    with without_garbage_collection():
        took = median(choose() for _ in range(rounds)) * 1e6
    name = f"choosing among {workers:,} workers, one of them ejected"
    return Check.at_most(name, took, _MAX_CHOICE_US, unit="µs")


def _ledgers() -> Iterator[Check]:
    items = user_like(_ITEMS)
    limits = Limits()
    slices = _slices(_holdings(items))

    def write() -> list[list[bytes]]:
        bodies = (pack(to_status(one, 0, 0), limits) for one in slices)
        return [[bytes(part) for part in encode(1, n, body)] for n, body in enumerate(bodies)]

    def read(directory: Directory) -> Ledger:
        ledger = Ledger(directory)
        ledger.open()
        for frames in messages:
            message = decode(frames, FROM_WORKER, limits).message
            assert isinstance(message, Status)
            ledger.announce(to_announcement(message))
        return ledger

    messages = write()
    directory = Directory()
    first_bytes, first = _memory(lambda: read(directory))
    # Another worker has other items of the same sizes.
    slices = _slices(_holdings({_next(digest): info for digest, info in items.items()}))
    messages = write()
    other_bytes, other = _memory(lambda: read(directory))
    with without_garbage_collection():
        written = median(_seconds(write) for _ in range(7)) * 1e3
        read_s = median(_seconds(lambda: read(Directory())) for _ in range(7)) * 1e3
    assert len(first) == len(other) == _ITEMS
    of = f"{_ITEMS} items"
    yield Check.at_most(f"ledger of {of}, an item", other_bytes / _ITEMS, _MAX_ITEM_BYTES, unit="B")
    yield Check(f"the first ledger of {of}, an item", first_bytes / _ITEMS, "B")
    yield Check("snapshot on the wire, an item", sum(len(part) for one in messages for part in one) / _ITEMS, "B")
    yield Check.at_most(f"reading a snapshot of {of}", read_s, _MAX_READ_MS, unit="ms")
    yield Check(f"writing a snapshot of {of}", written, "ms")
    yield _resuming()


def _resuming() -> Check:
    """Return what a session costs that broke for a second, next to one that begins with nothing."""
    items = user_like(_MANY_ITEMS + _CHANGES)
    old, new = list(items)[:_CHANGES], list(items)[-_CHANGES:]
    holdings = _holdings({digest: items[digest] for digest in items if digest not in new})
    holdings.number_changes()
    known = holdings.number
    for dropped, stored in zip(old, new, strict=True):
        holdings.drop(dropped)
        holdings.hold(stored, items[stored])
    whole, resumed = (sum(_nbytes(one) for one in sent) for sent in (_slices(holdings), holdings.join("back", known)))
    name = f"resuming a session that broke for a second, of a snapshot of {_MANY_ITEMS:,} items"
    return Check.at_most(name, 100 * resumed / whole, _MAX_RESUMED, unit="% of the bytes")


def _holdings(items: Mapping[Digest, FeatureInfo]) -> Holdings[str]:
    holdings: Holdings[str] = Holdings()
    for digest, info in items.items():
        holdings.hold(digest, info)
    return holdings


def _slices(holdings: Holdings[str]) -> list[Announcement]:
    return [*holdings.join("new"), *iter(lambda: holdings.next_slice("new"), None)]


def _nbytes(announcement: Announcement) -> int:
    return len(pack(to_status(announcement, 0, 0), Limits()))


def _next(digest: Digest) -> Digest:
    return Digest(bytes(255 - byte for byte in digest))


def _memory(make: Callable[[], _T]) -> tuple[int, _T]:
    """Measure the memory of what is made."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        made = make()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return after - before, made


def _seconds(work: Callable[[], object]) -> float:
    began = thread_time()
    work()
    return thread_time() - began
