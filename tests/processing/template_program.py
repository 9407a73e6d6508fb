"""A program for a template to fork, without libraries: does what the lines on its pipe say.

What it does when it is imported for the template is in `wishes.json` of the model folder.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

BALLAST_BYTES = 64 << 20
ballast: list[bytes] = []

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def import_libraries(*folders: Path) -> None:
    for folder in folders:
        for wish in json.loads((folder / "wishes.json").read_text()):
            WISHES[wish]()


def main() -> None:
    if wishes := [wish for wish in sys.argv if wish in WISHES]:
        WISHES[wishes[0]]()
    with socket.socket(fileno=int(sys.argv[1])) as pipe:
        while line := pipe.recv(64).decode():
            if line == "crash":
                ctypes.string_at(0)
            if line.isdecimal():
                os._exit(int(line))
            pipe.sendall(f"{os.getpid()} {len(ballast)}".encode())
    os._exit(0)


def load_ballast() -> None:
    ballast.append(os.urandom(BALLAST_BYTES))


def start_thread() -> None:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


def fork_anyway() -> None:
    """A mutant: a template that does not count its threads."""
    sys.modules["__main__"].check_can_fork = lambda: None  # type: ignore[attr-defined]


def fail() -> None:
    raise RuntimeError("a library that cannot be imported")


def fail_to_fork() -> None:
    def fork() -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    os.fork = fork


def fail_to_keep() -> None:
    """The machine runs out of descriptors as soon as a process is forked."""
    shipped = os.pidfd_open

    def pidfd_open(pid: int, flags: int = 0) -> int:
        if pid != os.getpid():
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
        return shipped(pid, flags)

    os.pidfd_open = pidfd_open


def keep_what_fails() -> None:
    """A mutant: a template that dies of a process of which it gets no descriptor, and lets it go on."""

    def keep(_: object, pid: int, status: socket.socket) -> None:
        del status
        os.pidfd_open(pid)

    fail_to_keep()
    sys.modules["__main__"].Forks._keep = keep


def keep_descriptors() -> None:
    """A mutant: what it forks has every descriptor that the template has."""
    sys.modules["__main__"].Forks._leave = lambda *_: None


def die_with_template() -> None:
    """A mutant: a process that ends when its template does."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


WISHES = {
    wish.__name__: wish
    for wish in (
        *(load_ballast, start_thread, fail, fork_anyway, keep_descriptors, die_with_template),
        *(fail_to_fork, fail_to_keep, keep_what_fails),
    )
}


if __name__ == "__main__":
    main()
