"""Files in memory that vLLM's processes and the process that embeds them map together.

A file without a name lasts as long as someone has it open; others of the same user open it through `/proc`. A file with
a name works as well, for `vllm serve` without semel around it.
"""

from __future__ import annotations

import os
from pathlib import Path

from semel.errors import ConfigError

__all__ = ["create_file", "open_file", "path_of"]


def create_file(name: str) -> int:
    """The descriptor of a new file without a name in the file system; `name` is for those who look at `/proc`."""
    return os.memfd_create(name, os.MFD_CLOEXEC)


def open_file(path: str, purpose: str) -> int:
    """The descriptor of the file at `path`; one that is not there is made."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot open {path} for {purpose}: {error.strerror}") from error


def path_of(descriptor: int) -> str:
    """Where other processes of the same user find an open file, while this process lives."""
    return str(Path("/proc") / str(os.getpid()) / "fd" / str(descriptor))
