"""Shared memory that processes have, and what is left of it: files in /dev/shm, and semel's memory without a name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

NAMED = "/dev/shm/"
NAMELESS = "/memfd:semel"


@dataclass(frozen=True, slots=True)
class Segment:
    """One piece of shared memory."""

    inode: int
    name: str


def segments_of(pids: Iterable[int]) -> set[Segment]:
    """What these processes have mapped or open."""
    found: set[Segment] = set()
    for pid in pids:
        try:
            found.update(_mapped(pid))
            found.update(_open(pid))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def left_of(segments: set[Segment]) -> set[Segment]:
    """Those that are still there: as a file, or in any process of this machine."""
    somewhere = segments_of(psutil.pids())  # by number and name: each kind has numbers of its own
    return {
        segment
        for segment in segments
        if (Path(segment.name).exists() if segment.name.startswith(NAMED) else segment in somewhere)
    }


def _mapped(pid: int) -> Iterator[Segment]:
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        *_, inode, name = line.split(maxsplit=5) if len(line.split(maxsplit=5)) == 6 else ("0", "")
        if name.startswith((NAMED, NAMELESS)):
            yield Segment(int(inode), name.removesuffix(" (deleted)"))


def _open(pid: int) -> Iterator[Segment]:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        name = str(descriptor.readlink())
        if name.startswith((NAMED, NAMELESS)):
            yield Segment(descriptor.stat().st_ino, name.removesuffix(" (deleted)"))
