"""The fork server: `python -m semel.processing.pool.fork_server_child FD MODULE [FOLDER] [background]`.

It imports what they import, runs nothing of it, and forks for each order. What it has imported is then in memory once,
however many pool processes there are, and none of them waits for imports. What it forks goes on as the program MODULE:
it closes every descriptor but its own, warms up, enters the sandbox, and only then sees a client's byte. The server
itself sees none, and has no key. It has one thread, and does not fork with more: what another thread has locked would
stay locked in the child for ever.

An order is one packet: the child's arguments, with its descriptors. The first descriptor is a socket for its status:
the child's number, with a descriptor of the child; then, once it has ended, its exit status. Without a child, it
is the negative number of the error. The fork server ends when no more orders can come and its last child has ended.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from semel.errors import ServiceError
from semel.processing.pool.child import log_as_child
from semel.processing.pool.command import CANNOT_FORK
from semel.processing.pool.preloaded_child import run_in_background

__all__ = ["Forks", "check_can_fork", "main"]

_MAX_ORDER_BYTES: Final = 4_096
_MAX_DESCRIPTORS: Final = 3
_STANDARD: Final = (0, 1, 2)
_THREAD_END_S: Final = 5.0
"""How long the kernel may take to end a thread that was joined."""

logger = logging.getLogger(__name__)


def main() -> None:
    """Import, then fork for each order; a child goes on as if it had been started as a program."""
    descriptor, name, *words = sys.argv[1:]
    log_as_child()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the frontend
    try:
        program = import_module(name)
        _import_libraries(program, words)
        check_can_fork()
        arguments = Forks(socket.socket(fileno=int(descriptor))).serve()
    except Exception as error:  # noqa: BLE001 the edge of the process; no child comes here
        logger.warning("%s; each preprocessing process imports its libraries itself, and takes more memory", error)
        os._exit(CANNOT_FORK)
    if arguments is None:
        os._exit(0)  # as pool processes do: taking torch down takes longer
    sys.argv[1:] = arguments
    program.main()


def _import_libraries(program: Any, words: Sequence[str]) -> None:
    folders = [Path(word) for word in words if word.startswith(os.sep)]
    if "background" in words:
        run_in_background(lambda: program.import_libraries(*folders))
    else:
        program.import_libraries(*folders)
    gc.collect()
    gc.freeze()  # a collection writes to the objects that it walks, and their pages would be shared no more


class Forks:
    """The orders that a fork server gets, and the children that it has."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._children: dict[int, tuple[int, socket.socket]] = {}  # by a descriptor of each: its number, its status
        self._ready = select.poll()
        self._ready.register(orders, select.POLLIN)

    def serve(self) -> list[str] | None:
        """Fork for each order. In a child: its arguments. In the server: None, once there is nothing left to do."""
        while self._children or self._orders.fileno() >= 0:
            for descriptor, _ in self._ready.poll():
                if descriptor in self._children:
                    self._reap(descriptor)
                elif (arguments := self._take_order()) is not None:
                    return arguments
        return None

    def _take_order(self) -> list[str] | None:
        """Fork for an order, if one has come; in a child: its arguments."""
        data, descriptors, *_ = socket.recv_fds(self._orders, _MAX_ORDER_BYTES, _MAX_DESCRIPTORS)
        if not data:
            self._ready.unregister(self._orders)
            self._orders.close()
            return None
        check_can_fork()
        status, *own = descriptors
        try:
            pid = os.fork()
        except OSError as error:
            _report_failure(socket.socket(fileno=status), error)
        else:
            if not pid:
                os.close(status)
                self._leave(own)
                return [*map(str, own), *data.decode().split()]
            self._keep(pid, socket.socket(fileno=status))
        for descriptor in own:
            os.close(descriptor)
        return None

    def _keep(self, pid: int, status: socket.socket) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except OSError as error:  # nobody could learn of its end; and a caller that gets no process may start another
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            _report_failure(status, error)
            return
        self._children[descriptor] = pid, status
        self._ready.register(descriptor, select.POLLIN)
        _report(status, pid, [descriptor])

    def _leave(self, own: Sequence[int]) -> None:
        """In a child: let go of all that is the fork server's, or another child's."""
        for one in (self._orders, *(status for _, status in self._children.values())):
            one.detach()
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 a path for each would be for nothing
            if (descriptor := int(name)) not in (*_STANDARD, *own):
                with contextlib.suppress(OSError):  # what the folder was listed with is closed already
                    os.close(descriptor)

    def _reap(self, descriptor: int) -> None:
        pid, status = self._children.pop(descriptor)
        self._ready.unregister(descriptor)
        os.close(descriptor)
        _, code = os.waitpid(pid, 0)
        with status:
            _report(status, os.waitstatus_to_exitcode(code))


def check_can_fork() -> None:
    """Refuse to go on with more than one thread, and on a kernel that has no descriptors of processes."""
    deadline_s = time.monotonic() + _THREAD_END_S
    while (threads := len(os.listdir("/proc/self/task"))) > 1:  # noqa: PTH208 a path for each would be for nothing
        if time.monotonic() > deadline_s:
            raise ServiceError(
                f"the fork server of preprocessing processes has {threads} threads after importing, and cannot fork"
            )
        time.sleep(0.01)
    os.close(os.pidfd_open(os.getpid()))


def _report_failure(status: socket.socket, error: OSError) -> None:
    with status:
        _report(status, -(error.errno or errno.EIO))


def _report(status: socket.socket, number: int, descriptors: Sequence[int] = ()) -> None:
    with contextlib.suppress(OSError):  # who waited for it has gone
        socket.send_fds(status, [str(number).encode()], descriptors)


if __name__ == "__main__":
    main()
