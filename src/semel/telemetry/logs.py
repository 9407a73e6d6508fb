"""The log: one line per message, as text or as JSON, with the request that it is about.

A line may contain text from a client. Characters that would begin another line, or that a terminal would obey, are
escaped, so only semel begins a line (threats, forged lines). Further lines of a message are indented.

A server's lines go through a bounded queue (`log_writer`). Those of the access log are written together, a moment
later: each write may wake another process that reads them. Any other line is written at once, with what came before it.
"""

from __future__ import annotations

import atexit
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal

from semel.telemetry.log_writer import LineWriter
from semel.telemetry.meter import Sample
from semel.telemetry.request_context import RequestContext, current_request
from semel.telemetry.spans import span_trace_id

__all__ = [
    "ACCESS_LOGGER",
    "JSON_LOGGING",
    "JsonLines",
    "LogFormat",
    "QueuedLines",
    "SampledLog",
    "TextLines",
    "is_json",
    "log_samples",
    "log_to_stderr",
]

ACCESS_LOGGER: Final = "semel.access"
"""The logger of the lines about answered requests."""

LogFormat = Literal["text", "json"]

_TEXT: Final = "%(levelname)s %(asctime)s %(name)s: %(message)s"
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
    writer: LineWriter | None = None,
    cell: str | None = None,
) -> None:
    """Log to standard error; a server does so through a writer.

    `text` is the `logging` format of text lines. Every line in JSON names the cell, if there is one.
    """
    handler = logging.StreamHandler(sys.stderr) if writer is None else QueuedLines(writer)
    handler.setFormatter(JsonLines(cell) if form == "json" else TextLines(text))
    logging.basicConfig(level=level, handlers=[handler])


def is_json() -> bool:
    """Return whether this process logs JSON."""
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)


def log_samples() -> Iterator[Sample]:
    """Read the counters of this process's log, for a meter."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, QueuedLines):
            yield from handler.writer.samples()


class QueuedLines(logging.Handler):
    """Hands lines to a writer; those of the access log may wait for others."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self.writer = writer
        # Configuring `logging` anew makes it forget that this one has to be flushed; vLLM does.
        atexit.register(self.flush)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line."""
        try:
            line = f"{self.format(record)}\n".encode(errors="backslashreplace")
        except Exception:  # noqa: BLE001 (as logging does: a line that cannot be formatted ends nothing)
            self.handleError(record)
            return
        self.writer.put(line, may_wait=record.name == ACCESS_LOGGER and record.levelno < logging.WARNING)

    def flush(self) -> None:
        """Wait for the lines to be written, for a second at most."""
        self.writer.flush()


class TextLines(logging.Formatter):
    """Lines for people: `INFO 2026-01-31 12:00:00,000 semel.fleet.fleet: [request 3f…] a message`."""

    def __init__(self, text: str = _TEXT) -> None:
        super().__init__(text)
        self._second = 0, ""
        """The last second that was formatted, and how: most lines share it with the one before."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - the name is logging's
        """Return the time, with milliseconds."""
        second, text = self._second
        if second != int(record.created):
            text = super().formatTime(record, datefmt).rpartition(",")[0]
            self._second = int(record.created), text
        return f"{text},{int(record.msecs):03d}"

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        """Return the first line."""
        record.message = f"{_prefix(_request(record))}{_escape(record.message)}"
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the name is logging's
        """Return the exception and its traceback, indented."""
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 - the name is logging's
        """Return the stack, indented."""
        return _indented(stack_info)


class JsonLines(logging.Formatter):
    """Lines for programs: one object each. JSON escapes everything that would end a line."""

    def __init__(self, cell: str | None = None) -> None:
        super().__init__()
        self._cell = cell

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
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
            if trace_id := span_trace_id(request.span):
                entry["trace_id"] = trace_id
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _request(record: logging.LogRecord) -> RequestContext | None:
    """Return the request that a line is about: the one that it names (`extra={"about": …}`), or the current one."""
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


_EVERY_S: Final = 1.0


class SampledLog:
    """A kind of log line, at most one a second."""

    def __init__(self, logger: logging.Logger, level: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._level = level
        self._clock = clock
        self._next_s = 0.0
        self._left_out = 0

    def log(self, message: str, *values: object, **options: object) -> None:
        """Log the line, or count it."""
        if (now_s := self._clock()) < self._next_s:
            self._left_out += 1
            return
        self._next_s = now_s + _EVERY_S
        left_out, self._left_out = self._left_out, 0
        if left_out:
            message, values = message + " (and %d more like it)", (*values, left_out)
        self._logger.log(self._level, message, *values, **options)  # type: ignore[arg-type]
