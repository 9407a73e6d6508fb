"""What the processes of `semel serve` print at a terminal: kept back while they start, and shown while they serve."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Final

__all__ = ["Output"]

_PIPE_BYTES: Final = 1 << 16  # as many as one holds
_KEPT_BYTES: Final = 1 << 16


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
                with contextlib.suppress(OSError):  # the terminal may be gone: then we are about to be told
                    sys.stderr.buffer.write(printed)
                    sys.stderr.buffer.flush()
