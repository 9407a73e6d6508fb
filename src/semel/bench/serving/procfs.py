"""What the kernel reports about processes of this machine: parents, processor time, memory."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

__all__ = ["descendants", "processor_s", "pss_bytes", "words_of"]

_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
_PARENT, _USER, _SYSTEM = 1, 11, 12  # fields of /proc/PID/stat after the name, which may have spaces


def descendants(pid: int) -> list[int]:
    """A process and all its descendants that are alive."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                children.setdefault(int(_stat(int(entry.name))[_PARENT]), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, ())
    return found


def words_of(pid: int) -> list[str]:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def processor_s(pids: Iterable[int]) -> float:
    """The processor time of these processes since their start, in steps of the kernel's tick (10 ms)."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = _stat(pid)
            total += int(fields[_USER]) + int(fields[_SYSTEM])
    return total * _TICK_S


def pss_bytes(pids: Iterable[int]) -> int:
    """The memory of these processes. Shared memory is divided among the processes that share it."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
            total += int(found[1]) * 1_024 if found else 0
    return total


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
