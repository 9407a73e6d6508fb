"""The output of `semel serve` and its processes, at a terminal or not; a terminal may go at any time.

At a terminal, what the children print while they start goes to a file, and only what they print later is shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Final, TextIO

from semel.cli.log_relay import json_line
from semel.cli.start_log import StartLog
from semel.telemetry.log_writer import LineWriter
from semel.telemetry.logs import LogFormat

__all__ = ["Output", "StandardError"]

_PIPE_BYTES: Final = 1 << 16  # as many as one holds
_MAX_FILE_BYTES: Final = 1 << 26
_WARNING: Final = re.compile(rb"(?:WARNING|ERROR|CRITICAL) \S+ \S+ semel[.\w]*: ")
"""The beginning of a line of `telemetry.logs`."""


class StandardError(io.TextIOBase):
    """Standard error, where printing neither fails nor blocks: what runs must not end or stop with its reader.

    A terminal is printed to at once. The signal that it is gone may arrive after the first print that fails. Anything
    else is written by a thread (threats S28).
    """

    @cached_property
    def writer(self) -> LineWriter:
        """The queue of bytes for standard error."""
        return LineWriter(sys.stderr.fileno())

    def write(self, text: str) -> int:
        """Print, if anybody is there."""
        if not self.isatty() and self._has_descriptor:
            self.writer.put(text.encode(errors="backslashreplace"))
            return len(text)
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    @property
    def _has_descriptor(self) -> bool:
        with contextlib.suppress(OSError):
            return sys.stderr.fileno() >= 0
        return False

    def flush(self) -> None:
        """Print what waits, if anybody is there."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def drain(self) -> None:
        """Wait a moment for what the thread has yet to print, as the last thing before a command ends."""
        if "writer" in vars(self):
            self.writer.flush()

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return its descriptor, which knows the terminal's width."""
        return self._stream.fileno()

    @property
    def _stream(self) -> TextIO:
        stream: TextIO = getattr(sys.stderr, "rich_proxied_file", sys.stderr)  # rich puts itself there meanwhile
        return stream


class Output:
    """A pipe that children print to: on to standard error if it is visible, else into a file.

    `log` reads it while they start.
    """

    def __init__(self, writer: LineWriter, *, is_visible: bool, form: LogFormat = "text") -> None:
        self._reader, self.descriptor = os.pipe()
        os.set_blocking(self._reader, False)
        self.writer = writer
        self._show = _by_line(self._put_json) if form == "json" else writer.put
        self._is_visible = is_visible
        self._file: BinaryIO | None = None
        self.path: Path | None = None
        """The file with everything that was not shown."""

        self.log: StartLog | None = StartLog()
        if not is_visible:
            descriptor, name = tempfile.mkstemp(prefix="semel_start-", suffix=".log")
            self._file, self.path = os.fdopen(descriptor, "wb", buffering=0), Path(name)
        asyncio.get_running_loop().add_reader(self._reader, self.read)

    def begin(self) -> None:
        """Show everything from now on, since the children have started, and drop the file."""
        self.read()
        self.log, self._is_visible = None, True
        self._drop_file()

    def show_warnings(self, show: Callable[[str], None]) -> None:
        """Show nothing any more but the warnings and errors of semel itself, each without its line end."""

        def take(line: bytes) -> None:
            if _WARNING.match(line):
                show(line.decode(errors="replace"))

        self.read()
        self._show, self._is_visible = _by_line(take), True

    def close(self, *, keep_file: bool) -> None:
        """Close the pipe; what is printed to it thereafter is lost."""
        asyncio.get_running_loop().remove_reader(self._reader)
        self.read()
        os.close(self._reader)
        os.close(self.descriptor)
        if not keep_file:
            self._drop_file()
        elif self._file is not None:
            self._file.close()

    def read(self) -> None:
        """Take in what is there."""
        with contextlib.suppress(BlockingIOError):
            while printed := os.read(self._reader, _PIPE_BYTES):
                if self.log is not None:
                    self.log.feed(printed)
                if self._file is not None and self._file.tell() < _MAX_FILE_BYTES:
                    with contextlib.suppress(OSError):  # the disk may be full
                        self._file.write(printed)
                if self._is_visible:
                    self._show(printed)
                if len(printed) < _PIPE_BYTES:
                    return

    def _put_json(self, line: bytes) -> None:
        if line.strip():
            self.writer.put(json_line(line) + b"\n")

    def _drop_file(self) -> None:
        if self._file is not None and self.path is not None:
            self._file.close()
            self.path.unlink(missing_ok=True)
            self._file = self.path = None


def _by_line(take: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """Return a function that takes what is printed, and passes whole lines on."""
    rest = b""

    def feed(printed: bytes) -> None:
        nonlocal rest
        *lines, rest = (rest + printed).split(b"\n")
        for line in lines:
            take(line)

    return feed
