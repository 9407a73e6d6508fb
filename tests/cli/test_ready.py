"""What `semel serve` makes of a frontend that is slow, or not there: a reason to wait on, never an end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from semel.cli import serve
from semel.errors import ConfigError
from semel.settings.frontend import ApiKeySettings, ServingSettings
from semel.settings.serve import ServeSettings
from semel.web.tls import TlsSettings
from tests.embeddings.certificates import Authority

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


def test_a_frontend_with_tls_is_asked_over_tls_whoever_has_signed_its_certificate(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path)
    tls = TlsSettings(authority.certificate, authority.private_key).context()
    assert tls is not None
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            with tls.wrap_socket(listener.accept()[0], server_side=True) as connection:
                connection.recv(4_096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert serve._ask_ready(f"https://127.0.0.1:{listener.getsockname()[1]}") == (True, "")
        thread.join(5)


def test_where_clients_need_a_certificate_the_metrics_port_is_asked() -> None:
    plain = ServingSettings()
    assert serve.ready_url(plain) is None
    strict = replace(plain, tls=TlsSettings(cert_reqs=2))
    with pytest.raises(ConfigError, match="--metrics-port"):
        serve.ready_url(strict)
    assert serve.ready_url(replace(strict, metrics_port=9100)) == "http://127.0.0.1:9100"


def test_the_url_that_is_shown_says_https_with_a_certificate() -> None:
    assert serve.ServeOptions(ServeSettings("m"), (), ()).url == "http://127.0.0.1:8000"
    serving = ServingSettings(tls=TlsSettings(Path("c.pem")))
    assert serve.ServeOptions(ServeSettings("m", serving=serving), (), ()).url == "https://127.0.0.1:8000"


def test_the_printed_curl_has_a_key_if_clients_need_one_and_never_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    for keys in ((), ("secret-of-a-client",)):
        serving = ServingSettings(keys=ApiKeySettings(keys))
        serve._greet(serve.ServeOptions(ServeSettings("m", serving=serving), (), [f"--api-key={key}" for key in keys]))
        printed = capsys.readouterr().err
        assert ('-H "Authorization: Bearer $API_KEY" ' in printed) == bool(keys)
        assert "secret-of-a-client" not in printed
