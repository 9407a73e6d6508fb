"""What `semel serve` and its processes print at a terminal, which may go at any time.

What the children print is kept back while they start, and shown while they serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Final, TextIO

__all__ = ["Output", "StandardError"]

_PIPE_BYTES: Final = 1 << 16  # as many as one holds
_KEPT_BYTES: Final = 1 << 16


class StandardError(io.TextIOBase):
    """Standard error, where printing never fails: a terminal that is gone must not end what runs in it.

    The signal that tells of it may arrive after the first print that fails.
    """

    def write(self, text: str) -> int:
        """Print, if anybody is there."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Print what waits, if anybody is there."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Its descriptor, which knows the terminal's width."""
        return self._stream.fileno()

    @property
    def _stream(self) -> TextIO:
        stream: TextIO = getattr(sys.stderr, "rich_proxied_file", sys.stderr)  # rich puts itself there meanwhile
        return stream


class Output:
    """A pipe that children print to. Its last bytes are kept, in case one of them cannot start."""

    def __init__(self) -> None:
        self._reader, self.descriptor = os.pipe()
        os.set_blocking(self._reader, False)
        self._kept = b""
        self._is_visible = False
        asyncio.get_running_loop().add_reader(self._reader, self._read)

    @contextlib.contextmanager
    def visible(self) -> Iterator[None]:
        """Meanwhile all that is printed goes to standard error."""
        self._is_visible = True
        try:
            yield
        finally:
            self._is_visible = False

    def last_lines(self, count: int) -> str:
        """What was printed last."""
        self._read()
        return "\n".join(self._kept.decode(errors="replace").splitlines()[-count:])

    def close(self) -> None:
        """Give the pipe back; whoever prints to it thereafter prints to nobody."""
        asyncio.get_running_loop().remove_reader(self._reader)
        os.close(self._reader)
        os.close(self.descriptor)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            printed = os.read(self._reader, _PIPE_BYTES)
            self._kept = (self._kept + printed)[-_KEPT_BYTES:]
            if self._is_visible:
                with contextlib.suppress(OSError):  # the terminal may be gone
                    sys.stderr.buffer.write(printed)
                    sys.stderr.buffer.flush()
