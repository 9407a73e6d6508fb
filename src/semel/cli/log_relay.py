"""The output of a server and of all that it starts, through one bounded queue to standard error.

Standard output and standard error are a pipe meanwhile, for this process and those that it starts: vLLM's lines,
warnings, progress bars, what C++ prints. A thread reads it at all times, so that nobody who prints waits for a log that
is not read (threats S28). As JSON, a line that is JSON passes as it is, and any other becomes the message of one. At a
terminal, text is printed directly: progress bars need one.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import tempfile
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from semel.engine.vllm.compat.internals import LOGGING_CONFIG
from semel.settings.environment import default_variable
from semel.telemetry.log_writer import LineWriter
from semel.telemetry.logs import JSON_LOGGING, LogFormat, log_to_stderr

__all__ = ["engine_logs", "json_line", "relayed_logs"]

_CHUNK_BYTES: Final = 1 << 16
_MAX_LINE_BYTES: Final = 1 << 20
_POLL_S: Final = 0.05
_END_S: Final = 1.0


@contextlib.contextmanager
def relayed_logs(form: LogFormat, cell: str | None = None) -> Iterator[None]:
    """Log to standard error in this form, and relay what is printed; as JSON, that becomes JSON and names the cell."""
    try:
        target = os.dup(sys.stderr.fileno())
    except OSError:  # a stream of a program that calls this one has no descriptor
        log_to_stderr(form, cell=cell)
        yield
        return
    is_relayed = form == "json" or not sys.stderr.isatty()
    writer = LineWriter(target)
    relay = _Relay(writer, target, form, cell) if is_relayed else None
    log_to_stderr(form, writer=writer, cell=cell)
    try:
        yield
    finally:
        if relay is not None:
            relay.close()
        writer.flush()


@contextlib.contextmanager
def engine_logs(form: LogFormat) -> Iterator[None]:
    """Let vLLM log as we do, unless it is configured otherwise; to be entered before it is imported."""
    if form == "text":
        yield
        return
    with tempfile.NamedTemporaryFile("w", prefix="semel-", suffix=".json") as file:
        json.dump(JSON_LOGGING, file)
        file.flush()
        with default_variable(LOGGING_CONFIG, file.name):
            yield


def json_line(line: bytes, cell: str | None = None) -> bytes:
    """Return a line as JSON: itself, if it is that already; else one that names the cell."""
    if line.startswith(b"{"):
        with contextlib.suppress(ValueError):
            json.loads(line)
            return line
    text = line.decode(errors="replace")
    entry = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "level": "WARNING" if "Warning" in text else "ERROR" if "Error" in text else "INFO",
        "logger": "output",
        "message": text,
        **({} if cell is None else {"cell": cell}),
    }
    return json.dumps(entry).encode()


class _Relay:
    def __init__(self, writer: LineWriter, target: int, form: LogFormat, cell: str | None) -> None:
        self._writer = writer
        self._target = target
        self._form = form
        self._cell = cell
        sys.stdout.flush()
        sys.stderr.flush()
        self._output = os.dup(sys.stdout.fileno())
        self._reader, writing = os.pipe()
        os.dup2(writing, sys.stdout.fileno())
        os.dup2(writing, sys.stderr.fileno())
        os.close(writing)
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Print what is left, and give both streams back. Processes that still print may go on: nobody reads it."""
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(self._output, sys.stdout.fileno())
        os.dup2(self._target, sys.stderr.fileno())
        self._is_closing.set()
        self._thread.join(_END_S)

    def _run(self) -> None:
        rest = b""
        while True:
            ready, _, _ = select.select([self._reader], [], [], _POLL_S)
            if not ready:
                if self._is_closing.is_set():
                    break
                continue
            if not (printed := os.read(self._reader, _CHUNK_BYTES)):
                break
            if self._form == "text":
                self._writer.put(printed)
                continue
            *lines, rest = (rest + printed).replace(b"\r", b"\n").split(b"\n")
            self._print(lines)
            if len(rest) > _MAX_LINE_BYTES:
                self._print([rest])
                rest = b""
        self._print([rest])

    def _print(self, lines: list[bytes]) -> None:
        for line in lines:
            if line.strip():
                self._writer.put(json_line(line, self._cell) + b"\n")
