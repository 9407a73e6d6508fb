"""Ports for servers that a benchmark or a test starts, a little later and perhaps again after a kill.

The kernel gives the ports of its own range, from 32768 on, to whoever asks for any and to each connection that goes
out. One of those would be free now and another's a moment later, and a client that tries one until somebody listens may
be connected to itself. So they are taken from below, and each process has some of them nearly to itself.
"""

from __future__ import annotations

import itertools
import os
import socket

__all__ = ["free_port"]

_FIRST = 20_000
_PROCESSES = 128
_OF_EACH = 96
_turns = itertools.count()


def free_port(count: int = 1) -> int:
    """Return the first of some ports of 127.0.0.1 that follow each other, are free and were not given lately."""
    first = _FIRST + os.getpid() % _PROCESSES * _OF_EACH
    for turn in itertools.islice(_turns, _OF_EACH):
        offset = turn * count % _OF_EACH
        if offset + count <= _OF_EACH and all(_is_free(first + offset + one) for one in range(count)):
            return first + offset
    raise OSError(f"no {count} ports are free from {first} to {first + _OF_EACH - 1}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
