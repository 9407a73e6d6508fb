"""The log of a start: the stage that its processes are in, and if they fail, the cause.

The cause is the first exception of the process that failed first. What follows it are consequences: other processes
that lost it, and the summary of the one that waited for all of them.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from time import monotonic
from typing import Any, Final

__all__ = ["FIRST_STAGE", "Progress", "StartLog"]

FIRST_STAGE: Final = "importing vLLM"

_STAGES: Final = tuple(
    (re.compile(pattern), stage)
    for pattern, stage in (
        (r"Fetching .*?(\d+)/(\d+)", r"downloading the model: file \1 of \2"),
        (r"Resolved architecture: (\S+)", r"configuring the engine for \1"),
        (r"Initializing a V1 LLM engine", "starting the engine's processes"),
        (r"Starting to load model", "loading weights"),
        (r"Loading .*shards:.*?(\d+)/(\d+)", r"loading weights: file \1 of \2"),
        (r"Loading weights took", "preparing the model"),
        (r"Dynamo bytecode transform|torch\.compile takes|Compiling a graph", "compiling"),
        (r"Capturing CUDA graphs?.*?(\d+)/(\d+)", r"capturing CUDA graphs: \1 of \2"),
        (r"KV cache size: ([\d,]+ tokens)", r"warming up, with a KV cache of \1"),
        (r"the worker for .* listens at", "loading the model's processor"),
    )
)
_PROCESS: Final = re.compile(r"^\((\S+ pid=\d+)\)\s?")
_HEAD: Final = re.compile(r"^(DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:,.]+ (?:\[[^\]]*\]|[\w.]+:) ?")
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_EXCEPTION: Final = re.compile(r"^([A-Za-z_][\w.]*?)(: (?P<message>.*)|)$")
_TRACEBACK: Final = "Traceback (most recent call last):"
_REFUSAL: Final = "semel: "
_NO_CAUSES: Final = frozenset(
    {"KeyboardInterrupt", "SystemExit", "CancelledError", "asyncio.exceptions.CancelledError"}
)
_MAX_LINE_CHARS: Final = 1_000
_MAX_REST_BYTES: Final = 1 << 16
_LAST_STAGE: Final = "loading the model's processor"

logger = logging.getLogger("semel.cli.serve")


class StartLog:
    """The output of a start so far."""

    def __init__(self) -> None:
        self.stage = FIRST_STAGE
        self._rest = b""
        self._in_traceback: set[str] = set()
        self._exception = self._refusal = self._error = self._last = ""

    def feed(self, printed: bytes) -> None:
        """Read on."""
        *lines, self._rest = (self._rest + printed).replace(b"\r", b"\n").split(b"\n")
        self._rest = self._rest[-_MAX_REST_BYTES:]
        for line in lines:
            for text in _texts(line.decode(errors="replace")):
                self._read(text[:_MAX_LINE_CHARS])

    @property
    def cause(self) -> str:
        """The cause of a failure, in one line; empty if nothing was printed."""
        return self._refusal or self._exception or self._error or self._last

    def _read(self, text: str) -> None:
        text = _COLOUR.sub("", text).rstrip()
        process, text = _split(_PROCESS, text)
        level, text = _split(_HEAD, text)
        if not text.strip():
            return
        self._last = text.strip()
        if text.startswith(_REFUSAL):
            self._refusal = self._refusal or text.removeprefix(_REFUSAL)
        self._follow(process, text)
        if level == "ERROR" and not self._error:
            self._error = text.strip()
        for pattern, stage in _STAGES:
            if (found := pattern.search(text)) is not None:
                self.stage = found.expand(stage)

    def _follow(self, process: str, text: str) -> None:
        """Keep the first exception at the end of a traceback; the lines of several processes may be mixed."""
        if text == _TRACEBACK:
            self._in_traceback.add(process)
        elif process in self._in_traceback and not text[0].isspace():
            self._in_traceback.discard(process)
            found = _EXCEPTION.match(text)
            if found is not None and found[1] not in _NO_CAUSES and not self._exception:
                self._exception = text


class Progress:
    """The stage of a start, shown at a terminal in one line that changes, else as lines of the log."""

    def __init__(self, update: Callable[[str], None] | None, clock: Callable[[], float] = monotonic) -> None:
        """`update` changes the line at a terminal."""
        self._update = update
        self._clock = clock
        self._began = self._stage_began = clock()
        self._stage = ""

    def show(self, stage: str, reason: str) -> None:
        """Show a stage; at the last one, `reason` says what the frontend waits for."""
        now = self._clock()
        kind, known = stage.partition(":")[0], self._stage.partition(":")[0]
        if kind != known:
            if self._stage:
                logger.info("%s took %.1f s", known, now - self._stage_began)
            elif self._update is None:
                logger.info("%s", kind)
            self._stage_began = now
        self._stage = stage
        if self._update is not None:
            detail = f" ({reason})" if reason and stage == _LAST_STAGE else ""
            self._update(f"{stage}{detail} · {now - self._began:.0f} s")


def _split(pattern: re.Pattern[str], text: str) -> tuple[str, str]:
    found = pattern.match(text)
    return (found[1], text[found.end() :]) if found is not None else ("", text)


def _texts(line: str) -> list[str]:
    """Return the lines that a line stands for: one of JSON has a message, and perhaps an exception."""
    if line.startswith("{"):
        try:
            entry: Any = json.loads(line)
            return _entry_texts(entry)
        except (ValueError, AttributeError, TypeError):
            pass
    return [line]


def _entry_texts(entry: Any) -> list[str]:
    message = str(entry["message"]) if "message" in entry else ""
    if entry.get("logger") == "semel" and entry.get("level") == "ERROR":
        message = f"{_REFUSAL}{message}"
    return [*message.split("\n"), *str(entry.get("exception", "")).split("\n")]
