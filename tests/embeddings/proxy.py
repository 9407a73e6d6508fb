"""Something between a client and a Redis that behaves as badly as networks do."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from semel.embeddings.address import StoreAddress

Answer = Callable[[socket.socket, bytes], None]
"""Passes on what a server sends, or not. Raises `OSError` to end the connection."""

_PATIENT_S = 60.0


@dataclass
class Proxy:
    """Where it listens, and what it does with what the server sends."""

    address: StoreAddress
    answer: Answer
    connections: int = 0
    sockets: list[socket.socket] = field(default_factory=list)


def honest(client: socket.socket, data: bytes) -> None:
    client.sendall(data)


def silent(_: socket.socket, __: bytes) -> None:
    """Swallow it."""


def cut_after(nbytes: int) -> Answer:
    """Close the connection after some bytes."""
    left = nbytes

    def answer(client: socket.socket, data: bytes) -> None:
        nonlocal left
        client.sendall(data[:left])
        left -= len(data)
        if left <= 0:
            raise OSError

    return answer


def reset_after(nbytes: int) -> Answer:
    """Reset the connection after some bytes."""
    cut = cut_after(nbytes)

    def answer(client: socket.socket, data: bytes) -> None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        cut(client, data)

    return answer


def trickle(client: socket.socket, data: bytes) -> None:
    """One byte each 50 ms."""
    for index in range(len(data)):
        client.sendall(data[index : index + 1])
        time.sleep(0.05)


def replaced(old: bytes, new: bytes) -> Answer:
    """Send something else instead."""

    def answer(client: socket.socket, data: bytes) -> None:
        client.sendall(data.replace(old, new))

    return answer


def constant(reply: bytes) -> Answer:
    """Send the same, whatever the server says, after having let everybody in."""

    def answer(client: socket.socket, data: bytes) -> None:
        client.sendall(data if data == b"+PONG\r\n" else reply)

    return answer


@contextmanager
def running_proxy(target: StoreAddress, answer: Answer = honest) -> Iterator[Proxy]:
    """A proxy in front of a server on 127.0.0.1. `answer` may be exchanged while it runs."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = Proxy(StoreAddress(host="127.0.0.1", port=listener.getsockname()[1]), answer)
        thread = threading.Thread(target=_accept, args=(listener, target, proxy), daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            for one in list(proxy.sockets):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            thread.join(_PATIENT_S)


def _accept(listener: socket.socket, target: StoreAddress, proxy: Proxy) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        proxy.connections += 1
        try:
            server = socket.create_connection((target.host, target.port), _PATIENT_S)
        except OSError:
            client.close()
            continue
        proxy.sockets += [client, server]
        for one in (client, server):
            one.settimeout(_PATIENT_S)
        pass_on = (client, server, lambda to, data: to.sendall(data))
        answer = (server, client, lambda to, data: proxy.answer(to, data))
        for arguments in (pass_on, answer):
            threading.Thread(target=_pump, args=arguments, daemon=True).start()


def _pump(source: socket.socket, to: socket.socket, send: Answer) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            send(to, data)
    for one in (source, to):  # a connection that lingers not is reset when it is closed, unless it was shut before
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RD)
        one.close()
