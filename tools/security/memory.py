"""What processes use of the memory that they may use, as the kernel counts it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path


def status_bytes(pid: int, name: str) -> int:
    """A size in the kernel's status of a process: RssAnon, VmData, VmHWM."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(pid)


def data_limit(pid: int) -> int | None:
    """The most private memory that the kernel gives a process; None if there is no limit."""
    for line in Path(f"/proc/{pid}/limits").read_text().splitlines():
        if line.startswith("Max data size"):
            soft = line.split()[3]
            return None if soft == "unlimited" else int(soft)
    raise ProcessLookupError(pid)


@dataclass(slots=True)
class Memory:
    """The most that any process was seen to use, and who used more than it may."""

    most_bytes: int = 0
    most_share: float = 0.0
    faults: list[str] = field(default_factory=list)

    def look(self, pid: int) -> None:
        """Look at a process, which may have ended by now."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            used, limit = status_bytes(pid, "RssAnon"), data_limit(pid)
            self.most_bytes = max(self.most_bytes, used)
            if limit is None:
                self.faults.append(f"process {pid} has no limit of memory")
                return
            self.most_share = max(self.most_share, used / limit)
            if used > limit:
                self.faults.append(f"process {pid} uses {used:,} bytes, of {limit:,} that it may use")
