"""`semel frontend` with TLS, hosts, proxies, CORS, limits of connections and a bucket that never answers, seen from
outside; and one that requires a sandbox which its kernel lacks.
"""

from __future__ import annotations

import base64
import ctypes
import io
import socket
import ssl
import struct
import subprocess
import time
import wave
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from tests.serve.served import SEMEL, until
from tests.wiring.lines import KEY, edge_frontend, edge_worker, sandboxed_frontend
from tests.wiring.processes import Places, Running, flags_as_words, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SOON_S = 60.0
HEADERS = {"authorization": f"Bearer {KEY}", "host": "chat.example.com"}
_LANDLOCK_CREATE_RULESET = 444
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_ENOSYS = 38


@dataclass
class Edge:
    frontend: Running
    worker: Running
    home: Path
    model: Path
    at: Places

    def context(self, ciphers: str | None = None, *, certificate: bool = True) -> ssl.SSLContext:
        return _context(self.home, ciphers, certificate=certificate)

    def get(self, path: str, **headers: str) -> httpx.Response:
        with self.frontend.client() as client:
            return client.get(path, headers=HEADERS | headers)


@pytest.fixture(scope="module")
def edge(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    home, model = tmp_path_factory.mktemp("edge"), tiny("qwen2-audio")
    subprocess.run([SEMEL, "key", "make", home / "keys"], check=True, capture_output=True, timeout=SOON_S)
    _write_certificates(home / "tls")
    at = Places(home, model)
    with socket.create_server(("127.0.0.1", 0)) as bucket:  # takes connections, and answers nothing
        endpoint = f"http://127.0.0.1:{bucket.getsockname()[1]}"
        environment = {"AWS_ENDPOINT": endpoint, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        environment |= {"AWS_REGION": "here", "KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}
        urls = f"https://localhost:{at.port}", f"http://127.0.0.1:{at.metrics_port}"
        worker_words = ["testing", "worker", model, *flags_as_words(edge_worker(at))]
        frontend_words = ["frontend", model, *flags_as_words(edge_frontend(at))]
        with (
            running("worker", home, *worker_words) as worker,
            running(
                "frontend",
                home,
                *frontend_words,
                url=urls[0],
                metrics_url=urls[1],
                tls=_context(home),
                environment=environment,
            ) as frontend,
        ):
            frontend.until_ready()
            yield Edge(frontend, worker, home, model, at)


def _write_certificates(home: Path) -> None:
    """Of a server and a client, by one authority."""
    home.mkdir()
    authority = trustme.CA()
    authority.cert_pem.write_to_path(home / "root.pem")
    for name, names in (("server", ("localhost", "127.0.0.1")), ("client", ("client.example",))):
        issued = authority.issue_cert(*names)
        issued.private_key_pem.write_to_path(home / f"{name}.key")
        for pem in issued.cert_chain_pems:
            pem.write_to_path(home / f"{name}.pem", append=True)


def _context(home: Path, ciphers: str | None = None, *, certificate: bool = True) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=home / "tls" / "root.pem")
    if certificate:
        made.load_cert_chain(home / "tls" / "client.pem", home / "tls" / "client.key")
    if ciphers is not None:
        made.maximum_version = ssl.TLSVersion.TLSv1_2
        made.set_ciphers(ciphers)
    return made


def clip(seconds: float, channels: int = 1) -> list[dict[str, Any]]:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((channels, 2, 16_000, 0, "NONE", ""))
        file.writeframes(b"\1\0" * int(seconds * 16_000 * channels))
    data = base64.b64encode(buffer.getvalue()).decode()
    return [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}]


def ask(edge: Edge, content: object) -> httpx.Response:
    with edge.frontend.client() as client:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        return client.post("/v1/chat/completions", json=body, headers=HEADERS)


def raw(edge: Edge, request: str) -> bytes:
    """The beginning of what comes in answer to it: an error, whole."""
    with edge.frontend.connect() as connection:
        connection.settimeout(SOON_S)
        connection.sendall(request.encode())
        found = b""
        while b"\r\n\r\n" not in found or not found.endswith(b"}"):
            found += (piece := connection.recv(65_536))
            if not piece:
                break
        return found


def test_workers_are_those_of_dns_and_of_the_flag_with_the_keys_of_the_folder(edge: Edge) -> None:
    page = edge.frontend.page()
    assert f'semel_worker_connected{{worker="tcp://127.0.0.1:{edge.at.worker_port}"}} 1.0' in page
    assert f'semel_worker_connected{{worker="ipc://{edge.home}/nobody.sock"}} 0.0' in page


def test_new_transport_keys_of_the_folder_are_taken_without_a_restart(edge: Edge) -> None:
    worker = f'worker="tcp://127.0.0.1:{edge.at.worker_port}"'
    assert edge.frontend.metric("semel_link_key_generation", worker) == 1
    subprocess.run([SEMEL, "key", "rotate", edge.home / "keys"], check=True, capture_output=True, timeout=SOON_S)
    until(lambda: edge.frontend.metric("semel_link_key_generation", worker) == 2, SOON_S)


def test_a_service_of_kubernetes_is_asked_for(edge: Edge) -> None:
    until(lambda: "--worker-endpoint-slices spaces/workers:7000 cannot be read" in edge.frontend.text, SOON_S)


def test_a_client_needs_a_certificate_and_a_cipher_of_the_list(edge: Edge) -> None:
    assert edge.get("/v1/models").status_code == 200
    for context in (edge.context(certificate=False), edge.context("AES128")):
        with pytest.raises(httpx.TransportError), httpx.Client(verify=context) as client:
            client.get(f"{edge.frontend.url}/health")
    with httpx.Client(verify=edge.context("AES256")) as client:
        assert client.get(f"{edge.frontend.url}/health").status_code == 200


def test_the_key_of_the_flag_is_needed(edge: Edge) -> None:
    assert edge.get("/v1/models", authorization="Bearer other").status_code == 401


def test_another_host_and_a_page_of_another_origin_are_refused(edge: Edge) -> None:
    assert edge.get("/v1/models").status_code == 200
    assert edge.get("/v1/models", host="evil.example").status_code == 421
    assert edge.get("/v1/models", origin="https://evil.example").status_code == 403


def test_a_named_proxy_says_who_its_client_is(edge: Edge) -> None:
    assert edge.get("/v1/models", **{"x-forwarded-for": "192.0.2.77"}).status_code == 200
    until(lambda: "192.0.2.77" in edge.frontend.text, SOON_S)


def test_a_page_of_the_named_origin_may_do_what_the_flags_say(edge: Edge) -> None:
    wish = {"origin": "https://page.example", "access-control-request-method": "GET"}
    with edge.frontend.client() as client:
        reply = client.options("/v1/models", headers={"host": "chat.example.com"} | wish)
        refused = client.options(
            "/v1/models", headers={"host": "chat.example.com"} | wish | {"access-control-request-method": "DELETE"}
        )
    assert reply.headers["access-control-allow-origin"] == "https://page.example"
    assert reply.headers["access-control-allow-credentials"] == "true"
    assert reply.headers["access-control-allow-methods"] == "GET"
    assert "x-mine" in reply.headers["access-control-allow-headers"]
    assert refused.status_code == 400


@pytest.mark.parametrize(
    ("content", "why"), [(clip(3), "2 s (--max-audio-s)"), (clip(1, 2), "1 (--max-audio-channels)")], ids=["s", "ch"]
)
def test_a_clip_over_a_limit_is_refused(edge: Edge, content: object, why: str) -> None:
    assert ask(edge, clip(1)).status_code == 200
    assert why in ask(edge, content).json()["error"]["message"]


def test_a_head_over_a_limit_is_refused(edge: Edge) -> None:
    for header in (f"X-Long: {'a' * 5_000}\r\n", "".join(f"X-{number}: a\r\n" for number in range(30))):
        assert raw(edge, f"GET /health HTTP/1.1\r\nHost: localhost\r\n{header}\r\n").startswith(b"HTTP/1.1 431 ")


def test_connections_are_limited(edge: Edge) -> None:
    assert edge.frontend.metric("semel_connections_limit") == 40


def test_a_bucket_that_does_not_answer_is_given_up(edge: Edge) -> None:
    with edge.frontend.client() as client:
        reply = client.get("/v1/files", headers=HEADERS)
    assert reply.status_code == 503, reply.text
    assert "longer than 0.5 s (--media-store-timeout-s)" in edge.frontend.text


def test_a_head_that_does_not_come_is_given_up(edge: Edge) -> None:
    """Long before the 120 s that there are without the flag: the answer has `SOON_S`."""
    assert raw(edge, "GET /health HTTP/1.1\r\nHost: ").startswith(b"HTTP/1.1 408 ")


def test_a_body_that_does_not_come_is_given_up(edge: Edge) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    answer = raw(edge, head + "Content-Length: 9\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 408 ") and b"3 s to come; raise it with --max-body-s" in answer


def test_a_client_that_reads_nothing_is_given_up(edge: Edge) -> None:
    """Long before the 120 s that there are without the flag. It asks for more than the kernel's buffers take."""

    def is_given_up() -> bool:
        return edge.frontend.metric("semel_refusals_total", 'code="client_stalled"') >= 1

    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    connection.settimeout(SOON_S)
    connection.connect(("127.0.0.1", edge.at.port))
    request = f"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n\r\n"
    with edge.context().wrap_socket(connection, server_hostname="localhost") as secured:
        for _ in range(5):
            with suppress(OSError):  # it is closed already
                secured.sendall(request.encode() * 15)
            with suppress(AssertionError):  # all of it went into the buffers
                until(is_given_up, 8)
            if is_given_up():
                break
        assert is_given_up()


def test_refusals_are_delayed_beyond_their_rate(edge: Edge) -> None:
    """Twenty are answered at once; without the flag, the others wait 50 ms each."""
    waited = 0.0
    for _ in range(40):
        began = time.monotonic()
        assert ask(edge, 7).status_code == 400
        waited = max(waited, time.monotonic() - began)
        if waited > 2:
            break
    assert waited > 2


def test_a_frontend_that_requires_a_sandbox_refuses_to_start_without_one(edge: Edge) -> None:
    """The kernel has no Landlock for it; the checks before the start, which would say so too, are left out."""
    at = Places(edge.home, edge.model, worker_port=edge.at.worker_port)
    words = ["frontend", edge.model, *flags_as_words(sandboxed_frontend(at))]
    with running("sandboxed", edge.home, *words, preexec=_without_landlock) as refused:
        until(lambda: refused.process.poll() is not None, SOON_S)
        assert refused.process.returncode != 0
        assert "--require-sandbox" in refused.text and "no landlock" in refused.text


def test_a_worker_that_ends_waits_as_long_as_its_flags_say(edge: Edge) -> None:
    edge.worker.end()
    assert "takes requests for 0.5 s (--drain-delay-s)" in edge.worker.text
    assert "within 3.5 s" in edge.worker.text


def _without_landlock() -> None:
    """Let the kernel have no Landlock for this process and those that it starts."""

    def step(code: int, jump_true: int, jump_false: int, value: int) -> bytes:
        return struct.pack("HBBI", code, jump_true, jump_false, value)

    program = (
        step(0x20, 0, 0, 0)  # the number of the call
        + step(0x15, 0, 1, _LANDLOCK_CREATE_RULESET)
        + step(0x06, 0, 0, 0x00050000 | _ENOSYS)
        + step(0x06, 0, 0, 0x7FFF0000)
    )
    buffer = ctypes.create_string_buffer(program)
    head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, head, 0, 0) == 0
