"""The kernel's figures about processes of this machine: parents, CPU time, context switches, memory."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

__all__ = ["busiest_s", "context_switches", "cpu_s", "descendants", "pss_bytes", "run_s", "thread_s", "words_of"]

_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
_SWITCHES: Final = re.compile(r"_switches:\s+(\d+)")
_PARENT, _USER, _SYSTEM = 1, 11, 12  # fields of /proc/PID/stat after the name, which may have spaces


def descendants(pid: int) -> list[int]:
    """Return a process and all its descendants that are alive."""
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
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def cpu_s(pids: Iterable[int]) -> float:
    """Return the CPU time of these processes since their start, in steps of the kernel's tick (10 ms)."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = _stat(pid)
            total += int(fields[_USER]) + int(fields[_SYSTEM])
    return total * _TICK_S


def run_s(pids: Iterable[int]) -> float:
    """The CPU time of the threads of these processes, as the scheduler counts it (ns). Ended threads are not in it."""
    return sum(thread_s(pids).values())


def thread_s(pids: Iterable[int]) -> dict[int, float]:
    """Return the CPU time of each thread of these processes, as the scheduler counts it (ns)."""
    return {thread: int(text.split()[0]) / 1e9 for thread, text in _by_thread(pids, "schedstat")}


def busiest_s(pids: Sequence[int], before: Mapping[int, float]) -> float:
    """Return what the busiest thread has run since `before`, besides the first of each process, which has the loop."""
    return max((ran - before.get(one, 0.0) for one, ran in thread_s(pids).items() if one not in pids), default=0.0)


def context_switches(pids: Iterable[int]) -> int:
    """Return how often the threads of these processes have been switched, voluntarily or not."""
    return sum(int(count) for _, text in _by_thread(pids, "status") for count in _SWITCHES.findall(text))


def _by_thread(pids: Iterable[int], name: str) -> Iterator[tuple[int, str]]:
    for pid in pids:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    yield int(thread.name), (thread / name).read_text()


def pss_bytes(pids: Iterable[int]) -> int:
    """Return the memory of these processes. Shared memory is divided among the processes that share it."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
            total += int(found[1]) * 1_024 if found else 0
    return total


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
