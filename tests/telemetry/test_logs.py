"""Lines of the log: whose they are, and that nobody but us begins one."""

from __future__ import annotations

import io
import json
import logging
import logging.config
import os
import re
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.telemetry import log_writer
from semel.telemetry.log_writer import DROPPED, LineWriter
from semel.telemetry.logs import ACCESS_LOGGER, JSON_LOGGING, JsonLines, QueuedLines, SampledLog, TextLines
from semel.telemetry.request_context import RequestContext, entered
from semel.telemetry.spans import span_trace_id
from tests.telemetry.spans import Traced

BEGINNING = re.compile(r"^[A-Z]+ \d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [\w.]+: ")
FORGED = "x\nINFO 2026-01-31 12:00:00,000 semel.access: POST /v1/chat/completions 200 in 0.001 s"


def logged(formatter: logging.Formatter, message: str, *args: object, **more: object) -> str:
    """What a handler with this formatter writes."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger = logging.getLogger("semel.tests")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        logger.info(message, *args, **more)  # type: ignore[arg-type]
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return stream.getvalue()


def failure(text: str) -> ValueError:
    """An error as it is caught."""
    try:
        raise ValueError(text)  # noqa: TRY301
    except ValueError as error:
        return error


def lines_begun(text: str) -> int:
    """How many lines a reader of the log sees: those that begin as lines do, whatever ends the one before."""
    return sum(BEGINNING.match(line) is not None for line in text.splitlines())


def test_a_line_says_which_request_it_is_about_and_only_then() -> None:
    with entered(RequestContext("3f2a", "mine")):
        assert logged(TextLines(), "hello").endswith("semel.tests: [request 3f2a of 'mine'] hello\n")
    with entered(RequestContext("3f2a")):
        assert logged(TextLines(), "hello").endswith("semel.tests: [request 3f2a] hello\n")
    assert logged(TextLines(), "hello").endswith("semel.tests: hello\n")


def test_a_line_can_be_about_another_request_than_the_one_in_hand() -> None:
    with entered(RequestContext("3f2a")):
        assert "[request other]" in logged(TextLines(), "hello", extra={"about": RequestContext("other")})


@pytest.mark.parametrize("place", ["message", "client_id", "request_id", "exception"])
def test_a_client_cannot_forge_a_line(place: str) -> None:
    """Log injection. The control is a plain formatter with the same fields, which it does beat."""
    request = RequestContext(FORGED if place == "request_id" else "r", FORGED if place == "client_id" else None)
    message = FORGED if place == "message" else "hello"
    error = failure(FORGED if place == "exception" else "no")
    with entered(request):
        ours = logged(TextLines(), message, exc_info=error)
        as_json = logged(JsonLines(), message, exc_info=error)
    naive = f"%(levelname)s %(asctime)s %(name)s: [request {request.request_id} {request.client_id}] %(message)s"
    theirs = logged(logging.Formatter(naive), message, exc_info=error)
    assert lines_begun(theirs) == 2
    assert lines_begun(ours) == 1
    assert len(as_json.splitlines()) == 1


@given(text=st.text(), client=st.none() | st.text())
def test_whatever_is_in_it_a_line_is_one_line_and_steers_no_terminal(text: str, client: str | None) -> None:
    with entered(RequestContext("r", client)):
        for formatter in (TextLines(), JsonLines()):
            (line,) = logged(formatter, "%s", text).splitlines()
            assert not re.search(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]", line)


async def test_json_has_one_object_a_line_with_the_request_the_trace_and_the_exception() -> None:
    spans = Traced()
    span = spans.tracing.begin("POST", {})
    with entered(RequestContext("3f2a", 'm"ine', span)):
        error, fields = failure("no\nway"), {"status": 200}
        line = logged(JsonLines(), "it is %s", "so\n", exc_info=error, extra={"fields": fields})
    told = json.loads(line)
    assert line.count("\n") == 1
    assert datetime.fromisoformat(told.pop("time")).tzinfo == UTC
    assert told.pop("exception").endswith("ValueError: no\nway")
    assert told.pop("pid") > 0
    assert told == {
        "level": "INFO",
        "logger": "semel.tests",
        "message": "it is so\n",
        "request_id": "3f2a",
        "client_request_id": 'm"ine',
        "trace_id": span_trace_id(span),
        "status": 200,
    }
    assert set(json.loads(logged(JsonLines(), "hello"))) == {"time", "level", "logger", "message", "pid"}
    span.end()
    await spans.sent()


def test_processes_that_are_not_ours_are_configured_to_the_same_lines() -> None:
    program = (
        "import json, logging.config, sys\n"
        "logging.config.dictConfig(json.loads(sys.argv[1]))\n"
        "logging.getLogger('vllm.engine').info('hello'); logging.getLogger('semel.x').info('hello')"
    )
    command = [sys.executable, "-c", program, json.dumps(JSON_LOGGING)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert [json.loads(line)["logger"] for line in done.stderr.splitlines()] == ["vllm.engine", "semel.x"]


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_process_logs_to_standard_error_in_the_form_it_is_given(form: str) -> None:
    program = (
        "import logging, sys; from semel.telemetry.logs import is_json, log_to_stderr\n"
        "log_to_stderr(sys.argv[1]); logging.info('json' if is_json() else 'text')"
    )
    done = subprocess.run([sys.executable, "-c", program, form], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == ""
    if form == "json":
        assert json.loads(done.stderr)["message"] == "json"
    else:
        assert done.stderr.endswith("root: text\n")


class Pipe:
    """A pipe that takes what is logged, and whose reader may sleep."""

    def __init__(self) -> None:
        self.reader, self.descriptor = os.pipe()
        os.set_blocking(self.reader, False)

    def read(self) -> str:
        with suppress(BlockingIOError):
            return os.read(self.reader, 1 << 20).decode()
        return ""

    def fill(self) -> None:
        os.set_blocking(self.descriptor, False)
        with suppress(BlockingIOError):
            while True:
                os.write(self.descriptor, bytes(4_096))
        os.set_blocking(self.descriptor, True)

    def empty(self) -> bytes:
        found = b""
        with suppress(BlockingIOError):
            while True:
                found += os.read(self.reader, 1 << 20)
        return found


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.empty()  # lets a thread that writes end its write
    os.close(made.reader)


@contextmanager
def access_log(handler: logging.Handler) -> Iterator[logging.Logger]:
    logger = logging.getLogger(ACCESS_LOGGER)
    handler.setFormatter(logging.Formatter("%(message)s"))
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield logger
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


def test_lines_of_the_access_log_are_written_together_and_a_warning_takes_them_along(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[bytes] = []
    monkeypatch.setattr(LineWriter, "_write", lambda _, batch: writes.append(bytes(batch)))
    monkeypatch.setattr(log_writer, "_BATCH_S", 60.0)
    with access_log(QueuedLines(writer := LineWriter(pipe.descriptor))) as logger:
        for number in range(100):
            logger.info("line %d", number)
        assert not writes
        logger.warning("now")
        writer.flush(30.0)
    assert b"".join(writes).decode().splitlines() == [*(f"line {number}" for number in range(100)), "now"]
    assert len(writes) <= 2  # a `logging.StreamHandler` writes 101 times


def test_lines_are_written_soon_without_a_warning(pipe: Pipe) -> None:
    with access_log(QueuedLines(LineWriter(pipe.descriptor))) as logger:
        logger.info("alone")
        assert select.select([pipe.reader], [], [], 30.0)[0]
    assert pipe.read() == "alone\n"


def test_what_is_written_at_once_is_whole_lines_that_a_pipe_takes_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[bytes] = []
    monkeypatch.setattr(LineWriter, "_write", lambda _, batch: writes.append(bytes(batch)))
    monkeypatch.setattr(log_writer, "_BATCH_S", 60.0)
    with access_log(QueuedLines(writer := LineWriter(2))) as logger:
        for _ in range(200):
            logger.info("ü" * 50)
        logger.warning("x" * 10_000)
        writer.flush(30.0)
    assert b"".join(writes).count(b"\n") == 201
    assert all(piece.endswith(b"\n") for piece in writes)
    assert all(len(piece) <= 4_096 for piece in writes[:-1])


def log_in_a_thread(handler: logging.Handler, lines: int) -> threading.Thread:
    def run() -> None:
        with access_log(handler) as logger:
            for number in range(lines):
                logger.warning("%06d %s", number, "x" * 100)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_s28_a_log_that_nobody_reads_stops_nobody_and_what_is_dropped_is_counted(pipe: Pipe) -> None:
    pipe.fill()
    writer = LineWriter(pipe.descriptor, max_bytes=10_000)
    thread = log_in_a_thread(QueuedLines(writer), 1_000)
    thread.join(30.0)
    assert not thread.is_alive()
    kept = 1_000 - writer.dropped
    assert 0 < kept <= 100
    read = pipe.empty()  # the reader wakes
    writer.flush(30.0)
    read += pipe.empty()
    writer.put(b"after\n")
    writer.flush(30.0)
    lines = (read + pipe.empty()).decode().replace("\0", "").splitlines()
    assert sum(line[:6].isdecimal() for line in lines) == kept
    assert f"semel: {writer.dropped} log lines were dropped, because nobody read the log" in lines
    assert "after" in lines


def test_s28_mutant_a_plain_handler_waits_for_the_reader(pipe: Pipe) -> None:
    pipe.fill()
    with os.fdopen(os.dup(pipe.descriptor), "w") as stream:
        thread = log_in_a_thread(logging.StreamHandler(stream), 1_000)
        thread.join(1.0)
        assert thread.is_alive()
        while thread.is_alive():
            pipe.empty()
            thread.join(0.01)


def test_s28_a_full_disk_costs_lines_and_nothing_else() -> None:
    with open("/dev/full", "wb", buffering=0) as full:  # noqa: PTH123
        writer = LineWriter(full.fileno())
        writer.put(b"one\ntwo\n")
        writer.flush(30.0)
    assert writer.dropped == 2


def test_s28_lines_that_a_supervisor_drops_are_in_the_counter_of_its_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without the supervisor's descriptor, the counter has the child's own lines only."""
    supervisor, child = LineWriter(2, max_bytes=0), LineWriter(2, max_bytes=0)
    descriptor = supervisor.share()
    try:
        supervisor.put(b"one\ntwo\n")
        child.put(b"three\n")
        assert [value for _, value, _ in child.samples()] == [1]
        monkeypatch.setenv(DROPPED, str(descriptor))
        assert [value for _, value, _ in child.samples()] == [3]
    finally:
        os.close(descriptor)


ENDING = """
import asyncio, logging, logging.config
from semel.telemetry.log_writer import LineWriter
from semel.telemetry.logs import ACCESS_LOGGER, log_to_stderr

async def main():
    log_to_stderr("text", writer=LineWriter(2))
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})  # as vLLM does when it is imported
    logging.getLogger(ACCESS_LOGGER).info("the last line")

asyncio.run(main())
"""


def test_a_process_that_ends_writes_its_last_lines_also_if_logging_was_configured_anew() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.endswith("the last line\n")


def test_s28_lines_of_strangers_are_one_a_second_with_the_number_left_out(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [100.0]
    sampled = SampledLog(logging.getLogger("semel.tests"), logging.WARNING, clock=lambda: now_s[0])
    for number in range(700):
        sampled.log("no key from %d", number)
    now_s[0] += 1.0
    sampled.log("no key from %d", 700)
    assert [record.getMessage() for record in caplog.records] == [
        "no key from 0",
        "no key from 700 (and 699 more like it)",
    ]
