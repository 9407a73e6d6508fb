"""Files in memory that vLLM's processes and the process that embeds them map together.

A file without a name lasts as long as someone has it open; others of the same user open it through `/proc`. A file with
a name works as well, for `vllm serve` without semel around it. `SharedPage` is such a file as cells of eight bytes,
which one process writes and others read.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import ClassVar, Self

from semel.errors import ConfigError

__all__ = ["SharedPage", "create_file", "descriptor_path", "open_file"]


def create_file(name: str) -> int:
    """Create a file without a name in the file system; `name` is for those who look at `/proc`."""
    return os.memfd_create(name, os.MFD_CLOEXEC)


def open_file(path: str, purpose: str) -> int:
    """Return the descriptor of the file at `path`; one that is not there is made."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot open {path} for {purpose}: {error.strerror}") from error


def descriptor_path(descriptor: int, process: int | None = None) -> str:
    """Return where other processes of the same user find a file that a process (this one) has open, while it lives."""
    return str(Path("/proc") / str(process or os.getpid()) / "fd" / str(descriptor))


class SharedPage:
    """A file as cells of eight bytes. Each is written by one store, so nobody reads half of one."""

    file_name: ClassVar[str]
    purpose: ClassVar[str]
    nbytes: ClassVar[int]

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        if os.fstat(descriptor).st_size < self.nbytes:
            os.ftruncate(descriptor, self.nbytes)
        self._memory = mmap.mmap(descriptor, self.nbytes)
        self._cells = memoryview(self._memory).cast("q")

    @classmethod
    def create(cls) -> Self:
        """Return a new page, without a name in the file system; it lasts as long as someone has it open."""
        return cls(create_file(cls.file_name))

    @classmethod
    def open(cls, path: str) -> Self:
        """Return the page at `path`; a file that is not there is made."""
        return cls(open_file(path, cls.purpose))

    @classmethod
    def attach(cls, path: str) -> Self:
        """Return the page that a process has made and shows under `/proc`. Raise `OSError` if it is not that page.

        The process may have ended, or be one of another machine: another file may be there now.
        """
        if Path(path).readlink() != Path(f"/memfd:{cls.file_name} (deleted)"):
            raise OSError(f"{path} is another file")
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(descriptor).st_size != cls.nbytes:
            os.close(descriptor)
            raise OSError(f"{path} has another size")
        return cls(descriptor)

    @property
    def path(self) -> str:
        """Its path for other processes of the same user, while this process lives."""
        return descriptor_path(self._descriptor)

    def close(self) -> None:
        """Let go of the memory."""
        self._cells.release()
        self._memory.close()
        os.close(self._descriptor)
