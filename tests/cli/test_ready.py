"""What `semel serve` makes of a frontend that is slow, or not there: a reason to wait on, never an end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from semel.cli import serve

HEAD = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"


@contextmanager
def answering(answer: bytes, *, closes: bool) -> Iterator[str]:
    """A server that sends some bytes, and then closes the connection or says nothing more."""
    kept: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            connection, _ = listener.accept()
            connection.recv(4_096)
            connection.sendall(answer)
            connection.close() if closes else kept.append(connection)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(5)
    for connection in kept:
        connection.close()


@pytest.mark.parametrize(
    ("answer", "closes", "reason"),
    [
        (HEAD % 30 + b'{"reason": "engine is paused"}', True, "engine is paused"),
        (HEAD % 100, True, "the frontend answers 503"),
        (HEAD % 100, False, "the frontend answers 503"),
        (b"HTTP/1.1 ", False, "the frontend is starting"),
        (b"", True, "the frontend is starting"),
        (b"nonsense\r\n\r\n", True, "the frontend is starting"),
    ],
    ids=["a reason", "a body that is cut off", "a late body", "a late head", "no answer", "no HTTP"],
)
def test_a_frontend_that_does_not_answer_in_time_is_waited_for(answer: bytes, closes: bool, reason: str) -> None:
    """The wrong implementation ended the command with a traceback when the body of an answer was late."""
    with answering(answer, closes=closes) as url:
        assert serve._ask_ready(url) == (False, reason)
