"""Shared memory: an anonymous file of fixed size, and windows onto it in other processes.

The file is a memfd. It has no name, so nothing remains after its last process ends, however it ends. It is sealed
against shrinking, because reading past the end of a shrunk file would kill the reader. `Segment` is the owner's side,
`Window` the side of all other processes.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self

from semel.errors import ConfigError, ProtocolError

__all__ = ["SEGMENT_ID_BYTES", "Lease", "Segment", "Window"]

SEGMENT_ID_BYTES: Final = 16
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; `mmap` does not name it


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of another process to read a range until it returns the lease."""

    id: int
    """Unique within the segment."""

    segment: bytes
    offset: int
    nbytes: int


class Segment:
    """The owner's side, mapped for reading and writing."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ConfigError(f"a segment of {size:,} bytes cannot be shared: give it more, or use no cache")
        self.id = secrets.token_bytes(SEGMENT_ID_BYTES)
        self.size = size
        self._fd = os.memfd_create("semel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, size)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
            self.memory = mmap.mmap(self._fd, size)
            self._populated = 0
        except OSError as error:
            os.close(self._fd)
            raise ConfigError(f"cannot map {size:,} bytes of shared memory: {error.strerror}; use less") from error

    def __repr__(self) -> str:
        return f"Segment({self.id.hex()[:12]}…, {self.size:,} bytes)"

    def fileno(self) -> int:
        """Return the descriptor, for a process that may write (`pass_fds`)."""
        return self._fd

    def populate(self, end: int) -> None:
        """Allocate the pages up to this offset before the first write to them.

        All at once is cheaper than one page fault after another: a first write of 12.66 MB takes 6 ms instead of 8.
        """
        if end > self._populated:
            start, self._populated = self._populated, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
            with suppress(OSError):  # an older kernel: the pages then come with the writes
                self.memory.madvise(_MADV_POPULATE_WRITE, start, self._populated - start)

    def read_into(self, view: memoryview) -> None:
        """Copy the beginning of the segment, as it is now; other threads run meanwhile.

        6.4 MB take 0.5 ms; a read of the file takes 1.7.
        """
        if view.nbytes > self.size:
            raise ValueError(f"{view.nbytes:,} bytes are not in {self!r}")
        target, source = (ctypes.c_char.from_buffer(memory) for memory in (view, self.memory))
        ctypes.memmove(ctypes.addressof(target), ctypes.addressof(source), view.nbytes)

    def forget(self, nbytes: int) -> None:
        """Give back the memory of the beginning of the segment; it reads as zeros from then on."""
        end = -(-min(nbytes, self.size) // mmap.PAGESIZE) * mmap.PAGESIZE
        if end >= self._populated:
            self._populated = 0
        with suppress(OSError):
            self.memory.madvise(mmap.MADV_REMOVE, 0, min(end, self.size))

    def open_to_read(self) -> int:
        """Open a new descriptor that cannot be mapped for writing, for another process. The caller closes it."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the descriptor. The memory stays until the last buffer over it is gone, in all processes."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        with suppress(BufferError):
            self.memory.close()


class Window:
    """Another process's side of a segment, mapped as a whole."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @classmethod
    def attach(cls, fd: int, *, writable: bool = False) -> Self:
        """Map a segment from a received descriptor. The caller still owns the descriptor."""
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0
        if seals & _SEALS != _SEALS:
            raise ProtocolError("a peer shared a file that is not sealed against shrinking and growing: not a segment")
        protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        try:
            return cls(mmap.mmap(fd, 0, prot=protection))
        except (OSError, ValueError) as error:
            raise ProtocolError(f"a shared segment cannot be mapped: {error}") from error

    @property
    def size(self) -> int:
        """Size of the segment in bytes."""
        return len(self._memory)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return a range of the segment."""
        self._check(offset, nbytes)
        return memoryview(self._memory)[offset : offset + nbytes]

    def borrow(self, lease: Lease, on_release: Callable[[int], object]) -> memoryview:
        """Return the range of a lease. Calls `on_release(lease.id)` once, when the last buffer over the range is gone.

        Any thread may drop the last buffer, at any point, so `on_release` must only record the id.
        """
        import numpy as np

        self._check(lease.offset, lease.nbytes)
        if lease.nbytes < 1:
            raise ProtocolError(f"lease {lease.id} is over no bytes")
        # Of all buffer types that work on a read-only mapping without a copy, only an array accepts a finalizer.
        exporter = np.frombuffer(self._memory, np.uint8, lease.nbytes, lease.offset)
        weakref.finalize(exporter, on_release, lease.id).atexit = False
        return exporter.data.toreadonly()

    def close(self) -> None:
        """Unmap the segment as soon as no buffer over it is left."""
        with suppress(BufferError):
            self._memory.close()

    def _check(self, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise ProtocolError(f"{nbytes:,} bytes from {offset:,} are not in a segment of {self.size:,}")
