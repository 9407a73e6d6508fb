"""How many processors this process may keep busy: those that the scheduler gives it, within its container's quota."""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path
from typing import Final

__all__ = ["usable_cores"]

_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(quota: Path = _QUOTA) -> int:
    """At least 1. Quotas count: a pod that may use 2 of a host's 64 cores must not start 64 processes."""
    cores = len(os.sched_getaffinity(0))
    try:
        allowed, period = quota.read_text().split()
        return max(1, min(cores, ceil(int(allowed) / int(period))))
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max" in it: there is no quota
        return cores
