"""The log: one line per message, as text or as JSON, with the request that it is about.

A line may contain text from a client. Characters that would begin another line, or that a terminal would obey, are
escaped, so only semel begins a line (threats, forged lines). Further lines of a message are indented.

A server under load logs a line for each request. Those of the access log are written together, a moment later: each
write may wake another process that reads them. Any other line is written at once, with what came before it.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import re
import select
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any, Final, Literal, TextIO

from semel.telemetry.request_context import RequestContext, current_request

__all__ = [
    "ACCESS_LOGGER",
    "JSON_LOGGING",
    "BatchedLines",
    "JsonLines",
    "LogFormat",
    "TextLines",
    "is_json",
    "log_to_stderr",
]

ACCESS_LOGGER: Final = "semel.access"
"""The logger of the lines about answered requests."""

LogFormat = Literal["text", "json"]

_TEXT: Final = "%(levelname)s %(asctime)s %(name)s: %(message)s"
_BATCH_S: Final = 0.05
_MAX_BATCH: Final = 256
_UNSAFE: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Characters that could end a line or control a terminal, and invalid characters; tabs are allowed."""

JSON_LOGGING: Final[Mapping[str, Any]] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"semel": {"()": "semel.telemetry.logs.JsonLines"}},
    "handlers": {"semel": {"class": "logging.StreamHandler", "formatter": "semel", "stream": "ext://sys.stderr"}},
    "root": {"handlers": ["semel"], "level": "INFO"},
    "loggers": {"vllm": {"level": "INFO", "handlers": [], "propagate": True}},
}
"""JSON logging for other processes, as a `logging.config.dictConfig`."""


def log_to_stderr(
    form: LogFormat,
    *,
    level: int = logging.INFO,
    text: str = _TEXT,
    stream: TextIO | None = None,
    cell: str | None = None,
) -> None:
    """Log to standard error, or to another stream.

    `text` is the `logging` format of text lines. Every line in JSON names the cell, if there is one.
    """
    handler = BatchedLines(stream or sys.stderr)
    handler.setFormatter(JsonLines(cell) if form == "json" else TextLines(text))
    logging.basicConfig(level=level, handlers=[handler])


def is_json() -> bool:
    """Whether this process logs JSON."""
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)


class BatchedLines(logging.StreamHandler[TextIO]):
    """Writes the lines of the access log together, after 50 ms if its event loop is free; all others at once."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._lines: list[str] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop that will write what waits."""

        # Whoever configures `logging` anew makes it forget that this one has to be flushed; vLLM does.
        atexit.register(self.flush)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, or let it wait for others."""
        try:
            self._lines.append(self.format(record) + self.terminator)
            may_wait = record.name == ACCESS_LOGGER and record.levelno < logging.WARNING
            loop = _running_loop() if may_wait else None
            if loop is None or len(self._lines) >= _MAX_BATCH:
                self.flush()
            elif loop is not self._loop:
                self._loop = loop
                loop.call_later(_BATCH_S, self.flush)
        except Exception:  # noqa: BLE001 (as logging does: a line that cannot be written ends nothing)
            self.handleError(record)

    def flush(self) -> None:
        """Write what waits: whole lines, as many at a time as a pipe takes in one piece."""
        with self.lock or nullcontext():
            lines, self._lines, self._loop = self._lines, [], None
            for batch in _batches(lines):
                self.stream.write(batch)
                super().flush()


def _batches(lines: Sequence[str]) -> Iterator[str]:
    """The lines together, each time at most 4,096 bytes: a pipe that others write to as well never tears these."""
    batch: list[str] = []
    size = 0
    for line in lines:
        nbytes = len(line.encode(errors="replace"))
        if batch and size + nbytes > select.PIPE_BUF:
            yield "".join(batch)
            batch, size = [], 0
        batch.append(line)
        size += nbytes
    if batch:
        yield "".join(batch)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class TextLines(logging.Formatter):
    """Lines for people: `INFO 2026-01-31 12:00:00,000 semel.fleet.fleet: [request 3f…] a message`."""

    def __init__(self, text: str = _TEXT) -> None:
        super().__init__(text)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        """The first line."""
        record.message = f"{_prefix(_request(record))}{_escape(record.message)}"
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the name is logging's
        """The exception and its traceback, indented."""
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 - the name is logging's
        """The stack, indented."""
        return _indented(stack_info)


class JsonLines(logging.Formatter):
    """Lines for programs: one object each. JSON escapes everything that would end a line."""

    def __init__(self, cell: str | None = None) -> None:
        super().__init__()
        self._cell = cell

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
        }
        if self._cell is not None:
            entry["cell"] = self._cell
        if (request := _request(record)) is not None:
            entry["request_id"] = request.request_id
            if request.client_id is not None:
                entry["client_request_id"] = request.client_id
            if request.span.trace_id:
                entry["trace_id"] = request.span.trace_id
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _request(record: logging.LogRecord) -> RequestContext | None:
    """The request that a line is about: the one that it names (`extra={"about": …}`), or the current one."""
    about: RequestContext | None = getattr(record, "about", None)
    return about or current_request()


def _prefix(request: RequestContext | None) -> str:
    if request is None:
        return ""
    client = "" if request.client_id is None else f" of {request.client_id!r}"
    return f"[request {_escape(request.request_id)}{client}] "


def _escape(text: str) -> str:
    return _UNSAFE.sub(lambda found: found.group().encode("unicode_escape").decode("ascii"), text)


def _indented(text: str) -> str:
    return "\n".join(f"    {_escape(line)}" for line in text.split("\n"))
