"""Lines of the log: whose they are, and that nobody but us begins one."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import logging.config
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.telemetry.logs import ACCESS_LOGGER, JSON_LOGGING, BatchedLines, JsonLines, TextLines
from semel.telemetry.request_context import RequestContext, entered
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
    span = spans.tracing.begin("POST", "server", {})
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
        "trace_id": span.trace_id,
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


class Counted(io.StringIO):
    """A stream that counts how often it is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0

    def write(self, text: str) -> int:
        self.writes += 1
        return super().write(text)


@pytest.fixture
def batched() -> Iterator[tuple[logging.Logger, Counted]]:
    """The access log, and where its lines go; those of other loggers below it go there too."""
    stream, logger = Counted(), logging.getLogger(ACCESS_LOGGER)
    handler = BatchedLines(stream)
    handler.setFormatter(logging.Formatter("%(message)s"))
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    yield logger, stream
    logger.removeHandler(handler)
    logger.level, logger.propagate = before


async def test_the_lines_of_many_requests_are_one_write(batched: tuple[logging.Logger, Counted]) -> None:
    logger, stream = batched
    for number in range(100):
        logger.info("line %d", number)
    assert stream.getvalue() == ""
    async with asyncio.timeout(30):
        while not stream.getvalue():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert stream.getvalue().splitlines() == [f"line {number}" for number in range(100)]
    assert stream.writes == 1  # a `logging.StreamHandler` writes 100 times


async def test_a_warning_another_line_and_a_full_batch_do_not_wait_and_all_keep_their_order(
    batched: tuple[logging.Logger, Counted],
) -> None:
    logger, stream = batched
    logger.info("before")
    logger.warning("now")
    assert stream.getvalue() == "before\nnow\n"
    logger.info("before another")
    logger.getChild("child").info("of another logger")
    assert stream.getvalue().endswith("before another\nof another logger\n")
    for _ in range(300):
        logger.info("many")
    assert stream.getvalue().count("many") == 256


async def test_what_is_written_at_once_is_whole_lines_that_a_pipe_takes_in_one_piece(
    batched: tuple[logging.Logger, Counted],
) -> None:
    logger, stream = batched
    pieces: list[str] = []
    stream.write = pieces.append  # type: ignore[assignment,method-assign]
    for _ in range(200):
        logger.info("ü" * 50)
    logger.warning("x" * 10_000)
    assert "".join(pieces).count("\n") == 201
    assert all(piece.endswith("\n") for piece in pieces)
    assert all(len(piece.encode()) <= 4_096 for piece in pieces[:-1])
    assert len(pieces) == 6


def test_lines_beside_an_event_loop_and_of_a_loop_that_ended_are_not_lost(
    batched: tuple[logging.Logger, Counted],
) -> None:
    logger, stream = batched

    async def log_and_end() -> None:
        logger.info("in a loop")

    asyncio.run(log_and_end())
    assert stream.getvalue() == ""
    logger.info("beside it")
    assert stream.getvalue() == "in a loop\nbeside it\n"


ENDING = """
import asyncio, logging, logging.config
from semel.telemetry.logs import ACCESS_LOGGER, log_to_stderr

async def main():
    log_to_stderr("text")
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})  # as vLLM does when it is imported
    logging.getLogger(ACCESS_LOGGER).info("the last line")

asyncio.run(main())
"""


def test_a_process_that_ends_writes_its_last_lines_also_if_logging_was_configured_anew() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.endswith("the last line\n")
