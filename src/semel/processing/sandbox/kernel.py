"""Calls that Python has no name for: `prctl`, `seccomp` and Landlock's three. Each raises `OSError` if it fails."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, Final

from semel.processing.sandbox.seccomp import Instruction, packed
from semel.processing.sandbox.syscalls import Architecture

__all__ = ["forbid_new_privileges", "landlock_version", "restrict_calls", "restrict_files", "seccomp_available"]

_SET_NO_NEW_PRIVS: Final = 38
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # on every architecture
_VERSION: Final = 1
_PATH_BENEATH: Final = 1
_READ_FILE: Final = 1 << 2
_READ_FOLDER: Final = 1 << 3
_FILE_RIGHTS: Final = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""How many rights on files each version of Landlock knows; later ones know no more."""

_TCP_VERSION: Final = 4
_SCOPE_VERSION: Final = 6
_ALL_TCP: Final = 0b11  # bind, connect
_ALL_SCOPES: Final = 0b11  # abstract sockets, signals

_SET_FILTER: Final = 1
_ACTION_AVAILABLE: Final = 2
_ALL_THREADS: Final = 1
_KEEP_SPECULATION: Final = 4  # older kernels slow a filtered process down against leaks within itself
_ERRNO_ACTION: Final = 0x0005_0000


def forbid_new_privileges() -> None:
    """From now on no program that this process starts has more rights than it; what follows needs that."""
    _call(_libc().prctl, _SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def landlock_version() -> int:
    """Return the version of Landlock that the kernel has."""
    return _call(_libc().syscall, _CREATE_RULESET, None, 0, _VERSION)


def restrict_files(readable: Iterable[Path], version: int) -> None:
    """Let this thread read what lies beneath these paths, and reach nothing else that Landlock of this version knows.

    What is not there is left out.
    """
    rights = (1 << _FILE_RIGHTS.get(version, max(_FILE_RIGHTS.values()))) - 1
    parts = [rights]
    parts += [_ALL_TCP] if version >= _TCP_VERSION else []
    parts += [_ALL_SCOPES] if version >= _SCOPE_VERSION else []
    attributes = struct.pack(f"={len(parts)}Q", *parts)
    ruleset = _call(_libc().syscall, _CREATE_RULESET, attributes, len(attributes), 0)
    try:
        for path in readable:
            _add_readable(ruleset, path)
        _call(_libc().syscall, _RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def seccomp_available(architecture: Architecture) -> None:
    """Raise if the kernel runs no filters."""
    _call(_libc().syscall, architecture.seccomp, _ACTION_AVAILABLE, 0, struct.pack("=I", _ERRNO_ACTION))


def restrict_calls(architecture: Architecture, program: Iterable[Instruction]) -> None:
    """Run this filter before each system call of every thread, for ever."""
    code = packed(tuple(program))
    buffer = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    flags = _ALL_THREADS | _KEEP_SPECULATION
    if thread := _call(_libc().syscall, architecture.seccomp, _SET_FILTER, flags, head):
        raise OSError(f"thread {thread} has a filter of its own")


def _add_readable(ruleset: int, path: Path) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        rights = _READ_FILE | _READ_FOLDER if path.is_dir() else _READ_FILE
        _call(_libc().syscall, _ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, place), 0)
    finally:
        os.close(place)


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _call(function: Any, *arguments: int | bytes | None) -> int:
    words = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    if (result := int(function(*words))) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
