"""Entering the sandbox, layer by layer, and the report of it.

A layer that the kernel, or a container around us, does not allow is missing: the report says why, and the others are
entered all the same. Whether that will do is not decided here.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from semel.errors import ConfigError
from semel.processing.sandbox.kernel import (
    forbid_new_privileges,
    landlock_version,
    restrict_calls,
    restrict_files,
    seccomp_available,
)
from semel.processing.sandbox.rules import rules_for
from semel.processing.sandbox.seccomp import filter_program
from semel.processing.sandbox.syscalls import Architecture, this_architecture

__all__ = ["LAYERS", "Sandbox", "check_whole", "enter_sandbox", "kernel_sandbox", "readable_paths"]

LAYERS: Final = ("limits", "no_new_privs", "landlock", "seccomp")
"""In the order in which they are entered: each one may take away what those before it need."""

_SYSTEM_FOLDERS: Final = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/etc/ld.so.cache",
    "/sys/devices/system/cpu",
)
_MAX_FILES: Final = 256
_LIMITS: Final = {
    resource.RLIMIT_CORE: 0,  # a dump would have clients' media in it
    resource.RLIMIT_NOFILE: _MAX_FILES,
    resource.RLIMIT_MEMLOCK: 0,
    resource.RLIMIT_MSGQUEUE: 0,
}


@dataclass(frozen=True, slots=True)
class Sandbox:
    """The layers around a process, and the reasons why others are missing."""

    active: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    """The layers that are not there, and what the kernel says of each."""

    landlock_version: int = 0

    @property
    def is_whole(self) -> bool:
        """Return whether no layer is missing."""
        return set(self.active) == set(LAYERS)

    def __str__(self) -> str:
        names = [f"landlock {self.landlock_version}" if name == "landlock" else name for name in self.active]
        lacks = [f"no {name} ({why})" for name, why in self.missing.items()]
        return ", ".join((*names, *lacks)) or "none"


def enter_sandbox(folders: Iterable[Path]) -> Sandbox:
    """Enter every layer that the kernel allows. Afterwards only these folders and the libraries can be read.

    There must be one thread: Landlock binds the calling one and those that it starts. With more it is left out.
    """
    version = _version_or_zero()
    paths = tuple(readable_paths(folders)) if version else ()
    steps: dict[str, Callable[[], None]] = {
        "limits": _limit_resources,
        "no_new_privs": forbid_new_privileges,
        "landlock": lambda: _restrict_files(paths),
        "seccomp": _restrict_calls,
    }
    active, missing = [], {}
    for layer in LAYERS:
        try:
            steps[layer]()
        except OSError as error:
            missing[layer] = error.strerror or str(error)
        else:
            active.append(layer)
    return Sandbox(tuple(active), missing, version if "landlock" in active else 0)


def check_whole(sandbox: Sandbox) -> None:
    """Refuse a sandbox with a layer missing."""
    if not sandbox.is_whole:
        lacks = " and ".join(f"{name} ({why})" for name, why in sandbox.missing.items())
        raise ConfigError(
            f"--require-sandbox: this kernel, or the container, has no {lacks}; use Linux 5.13 or later with Landlock "
            f"switched on (lsm=landlock,…), or leave the flag out"
        )


def kernel_sandbox() -> Sandbox:
    """Return what this kernel allows, without entering anything."""
    missing = {}
    for layer, check in {"landlock": _check_landlock, "seccomp": _check_seccomp}.items():
        try:
            check()
        except OSError as error:
            missing[layer] = error.strerror or str(error)
    return Sandbox(tuple(name for name in LAYERS if name not in missing), missing, _version_or_zero())


def readable_paths(folders: Iterable[Path]) -> Iterator[Path]:
    """Yield what a decoder reads: the interpreter, its libraries, these folders, and what links in them lead to."""
    yield from map(Path, _SYSTEM_FOLDERS)
    yield from (Path(prefix) / "lib" for prefix in (sys.prefix, sys.base_prefix))
    yield from (Path(entry) for entry in sys.path if entry)
    for folder in folders:
        yield folder
        yield from (path.resolve() for path in folder.rglob("*") if path.is_symlink())


def _limit_resources() -> None:
    for limit, value in _LIMITS.items():
        _, hard = resource.getrlimit(limit)
        lower = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (lower, lower))


def _restrict_files(paths: Iterable[Path]) -> None:
    if (threads := len([*Path("/proc/self/task").iterdir()])) > 1:
        raise OSError(f"the process has {threads} threads, and it would bind one")
    restrict_files(paths, landlock_version())


def _restrict_calls() -> None:
    architecture = _architecture()
    restrict_calls(architecture, filter_program(architecture, rules_for(os.getpid())))


def _check_landlock() -> None:
    landlock_version()


def _check_seccomp() -> None:
    seccomp_available(_architecture())


def _architecture() -> Architecture:
    if (found := this_architecture()) is None:
        raise OSError(f"there is no table of system calls for {os.uname().machine}")
    return found


def _version_or_zero() -> int:
    try:
        return landlock_version()
    except OSError:
        return 0
