"""A connection that is shut while another thread uses it."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from semel.embeddings.connection import Connection
from tests.embeddings.certificates import Authority

PATIENT_S = 30.0
SECRET = b"an encoder output"


def sent_while_shut(authority: Authority, shut: Callable[[Connection], None], monkeypatch: pytest.MonkeyPatch) -> bytes:
    """What the network sees of what another thread sends just before a connection with TLS is shut."""
    ours, theirs = socket.socketpair()
    for one in (ours, theirs):
        one.settimeout(PATIENT_S)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.certificate, authority.private_key)
    wires: list[socket.socket] = []

    def accept() -> None:
        server = context.wrap_socket(theirs, server_side=True)
        wires.append(socket.socket(fileno=server.detach()))  # from here on what the network sees

    thread = threading.Thread(target=accept)
    thread.start()
    encrypted = authority.client_context().wrap_socket(ours, server_hostname="localhost")
    thread.join(PATIENT_S)
    shutdown = socket.socket.shutdown

    def sending(self: socket.socket, how: int) -> None:
        if self is encrypted:
            assert self.send(SECRET) == len(SECRET)
        shutdown(self, how)

    connection = Connection(encrypted)
    with wires[0] as wire, monkeypatch.context() as patch:
        patch.setattr(socket.socket, "shutdown", sending)
        wire.settimeout(PATIENT_S)
        shut(connection)
        seen = b"".join(iter(lambda: wire.recv(1 << 16), b""))  # up to the end of it
        connection.close()
        return seen


def test_what_another_thread_sends_while_a_connection_is_shut_is_encrypted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S26. The control is `SSLSocket.shutdown`, which ends TLS first: what is sent then is plain."""
    authority = Authority.create(tmp_path)
    seen = sent_while_shut(authority, Connection.shut, monkeypatch)
    assert len(seen) > len(SECRET)
    assert SECRET not in seen
    seen = sent_while_shut(authority, lambda one: one._socket.shutdown(socket.SHUT_RDWR), monkeypatch)
    assert SECRET in seen
