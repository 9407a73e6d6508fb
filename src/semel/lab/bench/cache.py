"""`semel bench cache`: moves features between processes through shared memory, semel's and vLLM's, in one run.

A feature of 12.66 MB, the size of an HD image's, goes into the shared cache, is leased to another process, borrowed
there, and acknowledged. The yardstick is a copy of the same bytes within one process. The limit applies to the
CPU time of both processes until the acknowledgement. The wall-clock time, which a busy machine stretches, is
reported too. vLLM's ring gets the same tensor, which the same process reads back: the message to another process is not
counted against it. Without vLLM the checks have no baseline.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import median
from struct import Struct
from time import perf_counter, thread_time_ns
from typing import Any, Final, Self

from semel.cache import Borrower, Cache, Lease, Lender, LruCache, SharedCache, borrowed_feature, tensor_heads
from semel.core import Digest, Feature, Layout, Tensor
from semel.lab.bench.report import Check, Report, describe_machine
from semel.lab.bench.timing import Compared, compare, time_s

__all__ = ["run"]

_FEATURE_BYTES: Final = 12_660_000
_SLOTS: Final = 4
_SMALL_BYTES: Final = 64 << 10
_LATER_PUTS: Final = 500
_STUCK_SLOTS: Final = 46
_LEASE: Final = Struct("<Q16sQQ")
_ANSWER: Final = Struct("<2sQ")
_DEADLINE_S: Final = 60.0


def run(*, quick: bool) -> Report:
    """Measure; `quick` ends within a minute, with fewer rounds."""
    checks = [
        *_handing_over(turns=41 if quick else 201),
        *_looking_up(turns=51 if quick else 201),
        *_next_to_a_stuck_one(),
    ]
    return Report("cache", describe_machine(), tuple(checks))


def _handing_over(turns: int) -> Iterator[Check]:
    """From one process to another, compared with one copy of the same bytes (D4)."""
    feature = _feature(_FEATURE_BYTES)
    source = feature.tensors["pixel_values"].data
    copies = [memoryview(bytearray(_FEATURE_BYTES)) for _ in range(_SLOTS)]
    turn = count()
    copied, handed, ringed = _Times(), _Times(), _Times()

    def copy() -> None:
        copies[next(turn) % _SLOTS][:] = source

    def after_the_ring(work: Callable[[], _Span]) -> _Span:
        """Run `work` after the ring, so that both sides start with the same contents of the processor's caches."""
        if ring.there:
            ringed.add(_span(ring.put_and_get))
        return work()

    def take_turns(turns: int) -> Compared:
        return compare(
            lambda: copied.add(after_the_ring(lambda: _span(copy))),
            lambda: handed.add(after_the_ring(lambda: other.hand_over(feature))),
            turns=turns,
        )

    with _other_process() as other, _Ring.create(_SLOTS, _FEATURE_BYTES) as ring:
        take_turns(_SLOTS)
        first = handed.take()
        copied.clear()
        ringed.clear()
        found = take_turns(turns)
    warm, copies_took = handed.take(), copied.take()
    theirs = ringed.take() if ring.there else None
    name = "handing 12.66 MB to another process"
    times = None if theirs is None else theirs.cpu_s / found.baseline_s
    yield Check.at_most(f"{name}, CPU time, times one memcpy", 1 / found.ratio, 1.3, unit="×", baseline=times)
    cpu_ms, clock_ms = (None, None) if theirs is None else (theirs.cpu_s * 1e3, theirs.clock_s * 1e3)
    yield Check(f"{name}, CPU time", warm.cpu_s * 1e3, "ms", cpu_ms)
    yield Check(f"{name}, by the clock", warm.clock_s * 1e3, "ms", clock_ms)
    times = None if theirs is None else theirs.clock_s / copies_took.clock_s
    yield Check(f"{name}, by the clock, times one memcpy", warm.clock_s / copies_took.clock_s, "×", times)
    yield Check(f"{name} in fresh memory, CPU time", first.cpu_s * 1e3, "ms")
    yield Check("one memcpy of 12.66 MB, CPU time", found.baseline_s * 1e3, "ms")


def _looking_up(turns: int) -> Iterator[Check]:
    """Look up a cached digest among a thousand."""
    kinds: tuple[tuple[str, Cache], ...] = (
        ("in process", LruCache(1_000 * _SMALL_BYTES)),
        ("in shared memory", SharedCache.create(1_000 * _SMALL_BYTES)),
    )
    for name, cache in kinds:
        for number in range(1_000):
            cache.put(_digest(number), _feature(64))
        digest = _digest(500)
        times = [time_s(lambda: cache.get(digest), times=1_000) for _ in range(turns)]  # noqa: B023 - called at once
        yield Check.at_most(f"looking an item up, {name}", median(times) * 1e6, 3, unit="µs")
        cache.close()


def _next_to_a_stuck_one() -> Iterator[Check]:
    """Store one item that is never read; every later item is read at once (D4)."""
    feature = _feature(_SMALL_BYTES)
    cache = SharedCache.create(_STUCK_SLOTS * _SMALL_BYTES)
    cache.put(_digest(0), feature)
    cache.lease(_digest(0))
    stored = 0
    for number in range(1, _LATER_PUTS + 1):
        cache.put(_digest(number), feature)
        if (lease := cache.lease(_digest(number))) is not None:
            stored += 1
            cache.give_back(lease.id)
    cache.close()
    with _Ring.create(_STUCK_SLOTS, _SMALL_BYTES) as ring:
        theirs = ring.stored_next_to_a_stuck_one(_LATER_PUTS)
    name = "puts that are stored next to an item that is never read"
    share = None if theirs is None else 100 * theirs / _LATER_PUTS
    yield Check.at_least(name, 100 * stored / _LATER_PUTS, 100, unit="%", baseline=share)


@dataclass(frozen=True, slots=True)
class _Span:
    """One duration."""

    clock_s: float
    cpu_s: float


class _Times:
    """The durations of many rounds."""

    def __init__(self) -> None:
        self._spans: list[_Span] = []

    def add(self, span: _Span) -> float:
        """Add one; returns its CPU time."""
        self._spans.append(span)
        return span.cpu_s

    def clear(self) -> None:
        """Remove all durations."""
        self._spans.clear()

    def take(self) -> _Span:
        """Return the medians of the durations since the last call."""
        spans, self._spans = self._spans, []
        return _Span(median(span.clock_s for span in spans), median(span.cpu_s for span in spans))


class _Other:
    """Another process, which borrows features."""

    def __init__(self, pipes: tuple[int, int], runner: asyncio.Runner, cache: SharedCache, lender: Lender) -> None:
        self._to, self._from = pipes
        self._runner = runner
        self._cache = cache
        self._lender = lender
        self._numbers = count()

    def hand_over(self, feature: Feature) -> _Span:
        """Measure from having a feature until the other process has it. The lease is back when this returns."""
        digest = _digest(next(self._numbers))
        spent_s: list[float] = []
        span = _span(lambda: spent_s.append(self._hand_over(digest, feature)))
        self._runner.run(self._returned())
        return _Span(span.clock_s, span.cpu_s + spent_s[0])

    def _hand_over(self, digest: Digest, feature: Feature) -> float:
        """Returns the CPU time of the other process."""
        self._cache.put(digest, feature)
        lease = self._lender.lend(digest)
        assert lease is not None
        os.write(self._to, _LEASE.pack(lease.id, lease.segment, lease.offset, lease.nbytes))
        data = feature.tensors["pixel_values"].data
        seen, spent_ns = _ANSWER.unpack(os.read(self._from, _ANSWER.size))
        if seen != bytes((data[0], data[-1])):
            raise RuntimeError("the other process did not see the feature")
        return float(spent_ns / 1e9)

    async def _returned(self) -> None:
        async with asyncio.timeout(_DEADLINE_S):
            while self._lender.leases:  # noqa: ASYNC110 - between two measurements
                await asyncio.sleep(0.0005)


@contextmanager
def _other_process() -> Iterator[_Other]:
    with tempfile.TemporaryDirectory(prefix="semel-bench-") as folder, asyncio.Runner() as runner:
        path = Path(folder) / "memory"
        program = "import sys; from semel.lab.bench.cache import _borrow; _borrow(sys.argv[1])"
        command = [sys.executable, "-c", program, str(path)]
        cache = SharedCache.create(_SLOTS * (_FEATURE_BYTES + 64))
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:  # noqa: S603
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdout.read(1)
                lender = runner.run(Lender.connect(path, cache))
                yield _Other((process.stdin.fileno(), process.stdout.fileno()), runner, cache, lender)
                runner.run(_close(lender))
            finally:
                process.kill()
        cache.close()


async def _close(lender: Lender) -> None:
    lender.close()
    await lender.wait_closed()


def _borrow(path: str) -> None:
    """The other process: borrows each lease, and sends back the feature's first and last byte."""
    asyncio.run(_borrow_all(Path(path)))


async def _borrow_all(path: Path) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    incoming, outgoing = sys.stdin.fileno(), sys.stdout.fileno()
    described = _feature(_FEATURE_BYTES)
    heads, layout = tensor_heads(described), described.layout

    def take() -> None:
        started_ns = thread_time_ns()
        packed = os.read(incoming, _LEASE.size)
        if len(packed) != _LEASE.size:
            loop.remove_reader(incoming)
            ended.set()
            return
        view = borrowers.borrow(Lease(*_LEASE.unpack(packed)))
        data = borrowed_feature(view, "image", heads, layout).tensors["pixel_values"].data
        os.write(outgoing, _ANSWER.pack(bytes((data[0], data[-1])), thread_time_ns() - started_ns))

    async with Borrower(path) as borrowers:
        loop.add_reader(incoming, take)
        os.write(outgoing, b"!")
        await ended.wait()


@dataclass(slots=True)
class _Ring:
    """vLLM's shared memory with its writer and reader; empty if vLLM is not installed."""

    writer: Any = None
    reader: Any = None
    tensor: Any = None
    puts: int = 0

    @classmethod
    def create(cls, slots: int, nbytes: int) -> Self:
        try:
            import torch
            from vllm.distributed.device_communicators.shm_object_storage import (
                SingleWriterShmObjectStorage,
                SingleWriterShmRingBuffer,
            )
        except ImportError:
            return cls()
        from multiprocessing import Lock

        room = nbytes + 4_096
        memory = SingleWriterShmRingBuffer(slots * room, create=True)
        writer = SingleWriterShmObjectStorage(room, 1, memory)
        reader = SingleWriterShmObjectStorage.create_from_handle(replace(writer.handle(), reader_lock=Lock()))
        return cls(writer, reader, torch.full((nbytes,), 7, dtype=torch.uint8))

    @property
    def there(self) -> bool:
        return self.writer is not None

    def put_and_get(self) -> None:
        self.get(*self.put())

    def put(self) -> tuple[str, int, int]:
        self.puts += 1
        key = str(self.puts)
        return (key, *self.writer.put(key, self.tensor))

    def get(self, key: str, address: int, number: int) -> None:
        self.reader.get(address, number, self.writer.get_signature(key), key)

    def stored_next_to_a_stuck_one(self, later_puts: int) -> int | None:
        if not self.there:
            return None
        self.put()
        stored = 0
        for _ in range(later_puts):
            try:
                self.put_and_get()
            except MemoryError:  # vLLM then continues without caching the item
                continue
            stored += 1
        return stored

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.there:
            self.reader.close()
            self.writer.close()


def _span(work: Callable[[], object]) -> _Span:
    clock_s, processor_ns = perf_counter(), thread_time_ns()
    work()
    return _Span(perf_counter() - clock_s, (thread_time_ns() - processor_ns) / 1e9)


def _digest(number: int) -> Digest:
    return Digest(number.to_bytes(Digest.size, "little"))


def _feature(nbytes: int) -> Feature:
    data = memoryview((bytes(range(1, 256)) * (nbytes // 255 + 1))[:nbytes])
    return Feature("image", {"pixel_values": Tensor("uint8", (nbytes,), data)}, Layout((1,)))
