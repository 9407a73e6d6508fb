"""A bounded queue of log lines and the thread that writes them: a log that nobody reads stops nothing (threats S28).

A pipe whose reader sleeps, a terminal in scroll lock and a full disk block or fail a write for as long as they like.
Only the thread waits for them. Lines that find the queue full are dropped and counted; a line says so afterwards. What
the supervisor of a process drops is part of the counter of that process: a supervisor has no metrics of its own.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

from semel.telemetry import metrics
from semel.telemetry.meter import Sample

__all__ = ["DROPPED", "LineWriter", "dropped_by_supervisor"]

DROPPED: Final = "SEMEL_LOG_DROPPED"
"""The variable with the descriptor of the supervisor's counter."""

_MAX_BYTES: Final = 4 << 20
_BATCH_S: Final = 0.05
_MAX_BATCH: Final = 256
_FLUSH_S: Final = 1.0


class LineWriter:
    """Writes lines to a descriptor in order. `put` may be called by any thread, and never blocks."""

    def __init__(self, descriptor: int, *, max_bytes: int = _MAX_BYTES) -> None:
        self._descriptor = descriptor
        self._max_bytes = max_bytes
        self._lines: list[bytes] = []
        self._nbytes = 0
        self._is_urgent = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.dropped = 0
        """Lines that found the queue full, or that could not be written."""

        self._reported = 0
        self._shared: int | None = None

    def share(self) -> int:
        """Keep the number of dropped lines in memory that other processes can read; its descriptor."""
        if self._shared is None:
            self._shared = os.memfd_create("semel-log-dropped")
            self._count(0)
        return self._shared

    def put(self, line: bytes, *, may_wait: bool = False) -> None:
        """Queue a line, or drop it if the queue is full. One that may wait is written together with the next ones."""
        with self._changed:
            if self._nbytes + len(line) > self._max_bytes:
                self._count(max(1, line.count(b"\n")))
                return
            self._lines.append(line)
            self._nbytes += len(line)
            self._is_urgent |= not may_wait or len(self._lines) >= _MAX_BATCH
            if self._is_urgent or len(self._lines) == 1:
                self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="log writer", daemon=True)
                self._thread.start()

    def flush(self, within_s: float = _FLUSH_S) -> None:
        """Wait until every line is written, for a limited time."""
        deadline = time.monotonic() + within_s
        with self._changed:
            self._is_urgent = True
            self._changed.notify_all()
            while self._nbytes and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)

    def samples(self) -> Iterator[Sample]:
        """Read the counter, for a meter."""
        yield metrics.LOG_LINES_DROPPED, self.dropped + dropped_by_supervisor(), ()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                self._changed.wait_for(lambda: self._is_urgent, _BATCH_S)
                lines, self._lines, self._is_urgent = self._lines, [], False
            for batch in _batches(lines):
                self._write(batch)
                with self._changed:
                    self._nbytes -= len(batch)
                    self._changed.notify_all()
            if self.dropped > self._reported:
                dropped, self._reported = self.dropped - self._reported, self.dropped
                self._write(b"semel: %d log lines were dropped, because nobody read the log\n" % dropped)

    def _write(self, batch: bytes) -> None:
        """Write to the descriptor itself: a stream's lock would be held while the write blocks, also at exit."""
        view = memoryview(batch)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except BlockingIOError:  # the descriptor is shared with somebody who does not block
            with suppress(OSError, ValueError):
                select.select([], [self._descriptor], [])
                return self._write(bytes(view))
        except OSError:  # the disk is full, or the reader is gone
            with self._changed:
                lines = max(1, bytes(view).count(b"\n"))
                self._count(lines)
                self._reported += lines
        return None

    def _count(self, lines: int) -> None:
        self.dropped += lines
        if self._shared is not None:
            os.pwrite(self._shared, self.dropped.to_bytes(8, "big"), 0)


def dropped_by_supervisor() -> int:
    """Read how many lines the supervisor of this process has dropped; 0 if there is none."""
    with suppress(KeyError, OSError, ValueError):  # the variable may have been inherited without its descriptor
        return int.from_bytes(os.pread(int(os.environ[DROPPED]), 8, 0), "big")
    return 0


def _batches(lines: Sequence[bytes]) -> Iterator[bytes]:
    """Join lines to at most 4,096 bytes each time: a pipe that others write to as well never tears these."""
    batch: list[bytes] = []
    size = 0
    for line in lines:
        if batch and size + len(line) > select.PIPE_BUF:
            yield b"".join(batch)
            batch, size = [], 0
        batch.append(line)
        size += len(line)
    if batch:
        yield b"".join(batch)
