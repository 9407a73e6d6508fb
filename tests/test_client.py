"""`semel.inject`, and what may be at the other end of it; the real admin address is in `tests/worker/test_admin.py`."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from semel.client import inject
from semel.errors import ConfigError, NotReady, RequestError, ServiceError, WorkerLost
from tests.worker.stored import digest_of, image

pytestmark = pytest.mark.timeout(60)

KEY = "an-operator-s-key-0123456789"


@pytest.mark.parametrize(
    "url",
    [
        *("", "127.0.0.1:1", "ftp://127.0.0.1:1", "http://", "http://u:p@h:1", "http://h:x", "http://h:0"),
        "http://h:1/?a=b",
    ],
)
def test_an_address_that_is_none_is_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises(ConfigError, match="is no admin address"):
        inject(url, {}, key=KEY)


@pytest.mark.parametrize("key", ["", "a\r\nX-Injected: 1", "ü"])
def test_a_key_that_no_header_can_carry_is_refused_before_anything_is_sent(key: str) -> None:
    with pytest.raises(ConfigError, match="printable ASCII"):
        inject("http://127.0.0.1:1", {}, key=key)


def test_an_address_where_nobody_listens_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(NotReady, match=f"nobody answers at http://127.0.0.1:{port}"):
        inject(f"http://127.0.0.1:{port}", {}, key=KEY)


@contextlib.contextmanager
def answering(answer: bytes | None) -> Iterator[str]:
    """A server that is no worker: it gives this answer to one request, or none at all while it is asked."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def run() -> None:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(20)
                while answer is None and connection.recv(1 << 16):
                    pass
                if answer:
                    connection.recv(1 << 16)
                    connection.sendall(answer)

        thread = threading.Thread(target=run)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join(20)
        assert not thread.is_alive()


def http_answer(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (status, len(body), body)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (http_answer(200, b"hello"), ConfigError),
        (http_answer(200, b'{"outcomes":[{"digest":"a","status":"eaten"}]}'), ConfigError),
        (http_answer(404, b'{"error":{"code":"x","message":"y"}}'), ConfigError),
        (http_answer(302, b""), ConfigError),
        (http_answer(500, b'{"error":null}'), ConfigError),
        (
            http_answer(400, b'{"error":{"code":"invalid_request","message":"y"}}'),
            RequestError,
        ),
        (http_answer(500, b'{"error":{"code":"internal_error","message":"y"}}'), ServiceError),
        (http_answer(503, b'{"error":{"code":"not_ready","message":"y"}}'), NotReady),
        (b"garbage\r\n\r\n", WorkerLost),
        (b"", WorkerLost),
    ],
)
def test_whatever_answers_the_caller_gets_an_error_of_semel(answer: bytes, kind: type[Exception]) -> None:
    with answering(answer) as url, pytest.raises(kind):
        inject(url, {digest_of(1): image(3)}, key=KEY, timeout_s=20)


def test_a_refusal_is_told_though_the_connection_was_closed_while_the_body_was_sent_D7() -> None:
    refusal = http_answer(401, b'{"error":{"code":"invalid_admin_key","message":"wrong key"}}')
    with answering(refusal) as url, pytest.raises(ConfigError, match="wrong key"):
        inject(url, {digest_of(1): image(64 << 20)}, key=KEY, timeout_s=20)


def test_a_worker_that_never_answers_is_given_up_on() -> None:
    with answering(None) as url, pytest.raises(WorkerLost, match=r"did not answer in 0\.2 s"):
        inject(url, {digest_of(1): image(3)}, key=KEY, timeout_s=0.2)
