"""Ports for servers that start later."""

from __future__ import annotations

import os
import socket
from functools import partial
from pathlib import Path

import pytest

from semel.lab.bench import ports
from semel.lab.bench.ports import free_port

_KERNELS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_no_connection_takes_a_port_that_was_given() -> None:
    first = int(_KERNELS.read_text().split()[0])
    if first < 32_768:
        pytest.skip(f"the kernel was told to give ports from {first} on")
    assert all(free_port() < first for _ in range(200))


def test_a_port_is_not_given_twice_in_a_row_and_not_while_it_is_used() -> None:
    given = [free_port() for _ in range(50)]
    assert len(set(given)) == 50
    with socket.create_server(("127.0.0.1", given[0])):
        assert given[0] not in {free_port() for _ in range(200)}


def test_ports_that_follow_each_other_are_all_free() -> None:
    pairs = [free_port(2) for _ in range(10)]
    with socket.create_server(("127.0.0.1", pairs[0] + 1)):
        later = {free_port(2) for _ in range(60)}
    assert pairs[0] not in later
    assert all((one - another) % 2 == 0 for one in later for another in pairs)


def test_two_processes_are_given_others(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = {free_port() for _ in range(96)}
    monkeypatch.setattr(os, "getpid", partial(int, os.getpid() + 1))
    assert mine.isdisjoint(free_port() for _ in range(96))


def test_where_none_is_free_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_is_free", lambda _: False)
    with pytest.raises(OSError, match="no 1 ports are free from"):
        free_port()
