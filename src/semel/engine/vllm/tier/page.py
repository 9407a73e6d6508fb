"""A page of memory in which the engine core reports on encoder outputs to the process that embeds it.

A page of shared memory: the engine core writes, the embedding process reads, nobody waits. It has four parts.

- A ring of events: what was saved, what is gone, resets. An event is written before the blocks that it speaks of can be
  written again. A reader that fell behind gets to know it.
- Two cells per lease slot: the generation that a step has begun to load, and the generation that is done. Cells are
  never lost, however seldom somebody looks.
- The epoch (how often everything was forgotten), and whether weights have changed since the start.
- On a GPU, where the memory is: vLLM's worker process that saves makes or maps it under a name that is soon removed,
  and says here which of its descriptors it is. Whoever opens that checks that it is the same file.

A record of the ring has its own number in front, odd while it is written, and counts only when the head of the ring has
passed it. A cell is written by one store of eight bytes. So a writer that is killed anywhere leaves no false record.
Without anything to say nothing is written.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from typing import Final

from semel.core import FORM_DTYPES, Digest, Form
from semel.engine.tier_events import Gone, Overrun, Reset, Saved, TierEvent
from semel.engine.vllm.tier.shared_file import SharedPage, descriptor_path

__all__ = ["LEASE_SLOTS", "TierPage", "lease_generation", "lease_slot"]

LEASE_SLOTS: Final = 1_024
"""Leases that can be open at a time."""

_RECORDS: Final = 4_096
_CELLS: Final = 64
"""Of a record."""
_MAX_EXTENTS: Final = 24

_HEAD, _EPOCH, _NEW_WEIGHTS = 0, 1, 2
_PROCESS, _DESCRIPTOR, _DEVICE, _INODE = 3, 4, 5, 6
_USED: Final = 8
_DONE: Final = _USED + LEASE_SLOTS
_RING: Final = _DONE + LEASE_SLOTS
_BYTES: Final = 8 * (_RING + _RECORDS * _CELLS)

_SAVED, _GONE, _RESET = 1, 2, 3
_DIGEST: Final = struct.Struct("4q")
_DTYPES: Final = tuple(FORM_DTYPES)


def lease_slot(lease: int) -> int:
    """Return the cell of a lease."""
    return lease % LEASE_SLOTS


def lease_generation(lease: int) -> int:
    """Return how many leases have had its slot, with it."""
    return lease // LEASE_SLOTS


class TierPage(SharedPage):
    """The page between one engine core and the process that embeds it."""

    file_name = "semel-tier-page"
    purpose = "the embedding tier's events"
    nbytes = _BYTES

    # The engine core writes.

    def saved(self, digest: Digest, transfer: int, extents: tuple[tuple[int, int], ...], form: Form) -> None:
        """Report an output in the host cache. One in very many pieces is not reported: it stays on this host."""
        rows, columns, dtype = form
        if len(extents) <= _MAX_EXTENTS and dtype in _DTYPES:
            places = [number for extent in extents for number in extent]
            self._write(
                [_SAVED, transfer, *_DIGEST.unpack(digest), rows, columns, _DTYPES.index(dtype), len(extents), *places]
            )

    def gone(self, digest: Digest, transfer: int) -> None:
        """Report that an output is not in the host cache any more, before its blocks are written again."""
        self._write([_GONE, transfer, *_DIGEST.unpack(digest)])

    def reset(self, *, new_weights: bool) -> None:
        """Report that everything is forgotten."""
        if new_weights:
            self._cells[_NEW_WEIGHTS] = 1
        self._cells[_EPOCH] += 1
        self._write([_RESET, int(new_weights)])

    def use(self, lease: int) -> None:
        """Report that a step loads the output of a lease."""
        self._cells[_USED + lease_slot(lease)] = lease_generation(lease)

    def finish(self, lease: int) -> None:
        """Report that nobody reads the output of a lease any more."""
        self._cells[_DONE + lease_slot(lease)] = lease_generation(lease)

    # The worker process that saves writes.

    def announce(self, region: int) -> None:
        """Say which of this process's descriptors is the memory."""
        found = os.fstat(region)
        self._cells[_PROCESS], self._cells[_DESCRIPTOR] = os.getpid(), region
        self._cells[_DEVICE], self._cells[_INODE] = found.st_dev, found.st_ino

    # The embedding process reads.

    def open_region(self, nbytes: int) -> int:
        """Open the memory that was announced. Raise `OSError` if it is not there, or not the one of this engine."""
        process, number, *file = self._cells[_PROCESS : _INODE + 1].tolist()
        if not process:
            raise OSError("no worker process of the engine has said where its memory is")
        path = descriptor_path(number, process)
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        found = os.fstat(descriptor)
        if [found.st_dev, found.st_ino] != file or found.st_size != nbytes:
            os.close(descriptor)
            raise OSError(f"{path} is not the memory that was announced")
        return descriptor

    @property
    def epoch(self) -> int:
        """Number of resets."""
        return self._cells[_EPOCH]

    @property
    def has_new_weights(self) -> bool:
        """True if weights have changed since the engine started."""
        return bool(self._cells[_NEW_WEIGHTS])

    def is_used(self, lease: int) -> bool:
        """Return whether a step has begun to load what came under a lease."""
        return self._cells[_USED + lease_slot(lease)] == lease_generation(lease)

    def is_done(self, lease: int) -> bool:
        """Return whether nobody reads any more what came under a lease."""
        return self._cells[_DONE + lease_slot(lease)] == lease_generation(lease)

    def read(self, position: int) -> tuple[list[TierEvent], int]:
        """Return the events after `position`, which is 0 at first, and the position after them."""
        events: list[TierEvent] = []
        while position < (head := self._cells[_HEAD]):
            event = self._read_record(position) if head - position <= _RECORDS else None
            if event is None:
                return [Overrun()], head
            events.append(event)
            position += 1
        return events, position

    def _write(self, values: Iterable[int]) -> None:
        number = self._cells[_HEAD]
        start = _RING + number % _RECORDS * _CELLS
        self._cells[start] = 2 * number + 1
        for cell, value in enumerate(values, start + 1):
            self._cells[cell] = value
        self._cells[start] = 2 * number + 2
        self._cells[_HEAD] = number + 1

    def _read_record(self, number: int) -> TierEvent | None:
        """None if it was overwritten."""
        start = _RING + number % _RECORDS * _CELLS
        version = self._cells[start]
        values = self._cells[start + 1 : start + _CELLS].tolist()
        if version != 2 * number + 2 or self._cells[start] != version:
            return None
        return _event(values)


def _event(values: list[int]) -> TierEvent:
    kind, transfer = values[:2]
    if kind == _RESET:
        return Reset(new_weights=bool(transfer))
    digest = Digest(_DIGEST.pack(*values[2:6]))
    if kind == _GONE:
        return Gone(digest, transfer)
    rows, columns, dtype, pieces = values[6:10]
    numbers = values[10 : 10 + 2 * pieces]
    extents = tuple(zip(numbers[::2], numbers[1::2], strict=True))
    return Saved(digest, transfer, extents, (rows, columns, _DTYPES[dtype]))
