"""What somebody would try who has taken over a process that decodes: one function for each try.

Each returns what it got, or raises `OSError`. They are called inside a pool process, by name, with arguments from JSON.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import resource
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long


class _Span(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def read_file(path: str) -> str:
    return Path(path).read_bytes()[:64].decode(errors="replace")


def list_folder(path: str) -> str:
    return ",".join(sorted(entry.name for entry in Path(path).iterdir()))


def read_environment(pid: int) -> str:
    return str(len(Path(f"/proc/{pid}/environ").read_bytes()))


def read_memory_file(pid: int, address: int, nbytes: int) -> str:
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(nbytes).hex()


def read_memory(pid: int, address: int, nbytes: int) -> str:
    buffer = ctypes.create_string_buffer(nbytes)
    ours, theirs = _Span(ctypes.addressof(buffer), nbytes), _Span(address, nbytes)
    arguments = (ctypes.byref(ours), ctypes.c_ulong(1), ctypes.byref(theirs), ctypes.c_ulong(1), ctypes.c_ulong(0))
    _checked(_libc.process_vm_readv(pid, *arguments))
    return buffer.raw.hex()


def trace(pid: int) -> str:
    _checked(_libc.ptrace(_SEIZE, pid, None, None))
    _checked(_libc.ptrace(_INTERRUPT, pid, None, None))
    os.waitpid(pid, 0x4000_0000)  # __WALL
    _checked(_libc.ptrace(_DETACH, pid, None, None))
    return "traced"


def send_signal(pid: int) -> str:
    os.kill(pid, signal.SIGURG)  # which is ignored, unless somebody listens
    return "sent"


def own_signals(pid: int) -> str:
    """Let the kernel send a signal whenever something arrives."""
    ours, theirs = os.pipe()
    try:
        fcntl.fcntl(ours, fcntl.F_SETOWN, pid)
    finally:
        os.close(ours)
        os.close(theirs)
    return "owned"


def slow_down(pid: int) -> str:
    os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid))
    return "set"


def connect(port: int) -> str:
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        return "connected"


def send_datagram(port: int) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
        return str(sending.sendto(b"x", ("127.0.0.1", port)))


def connect_locally(path: str) -> str:
    with socket.socket(socket.AF_UNIX) as connecting:
        connecting.connect(path)
    return "connected"


def listen() -> str:
    with socket.create_server(("127.0.0.1", 0)):
        return "listening"


def fork() -> str:
    if not (pid := os.fork()):
        os._exit(0)
    os.waitpid(pid, 0)
    return "forked"


def spawn() -> str:
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
    return "spawned"


def execute(marker: str) -> NoReturn:
    os.execv("/bin/sh", ["sh", "-c", f": > {marker}"])


def create(path: str) -> str:
    return str(Path(path).write_bytes(b"x"))


def overwrite(path: str) -> str:
    with Path(path).open("r+b") as file:
        return str(file.write(b"x"))


def truncate(path: str) -> str:
    os.truncate(path, 0)
    return "cut"


def remove(path: str) -> str:
    Path(path).unlink()
    return "removed"


def rename(path: str) -> str:
    Path(path).rename(f"{path}.other")
    return "renamed"


def make_folder(path: str) -> str:
    Path(path).mkdir()
    return "made"


def make_link(path: str) -> str:
    Path(path).symlink_to("/etc/passwd")
    return "made"


def change_mode(path: str) -> str:
    Path(path).chmod(0o777)
    return "changed"


def change_times(path: str) -> str:
    os.utime(path, (1, 1))
    return "changed"


def overwrite_memory() -> str:
    """Fill every file that it has a descriptor of, as far as it may, by writing and through a mapping."""
    changed = 0
    for descriptor in range(3, 64):
        try:
            nbytes = min(os.fstat(descriptor).st_size, 1 << 20)
            with mmap.mmap(descriptor, nbytes) as mapping:
                mapping[:] = b"\xee" * nbytes
                changed += 1
        except (OSError, ValueError):
            continue
    return str(changed)


def make_memory() -> str:
    os.close(os.memfd_create("x"))
    return "made"


def share_memory() -> str:
    with mmap.mmap(-1, 1 << 20) as shared:  # MAP_SHARED, as Python does unless told otherwise
        shared[:] = b"x" * len(shared)
    return "shared"


def raise_limit() -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (soft + (1 << 20), hard))
    except ValueError as error:  # as Python says it
        raise PermissionError(str(error)) from None
    return "raised"


def dump_core() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_CORE)
    if soft == 0:
        raise PermissionError("cores are not dumped")
    return "dumped"


def find_variable(name: str) -> str:
    if name not in os.environ:
        raise PermissionError(f"{name} is not there")
    return os.environ[name]


ATTEMPTS: Final[dict[str, Callable[..., Any]]] = {
    name: made
    for name, made in list(globals().items())
    if callable(made) and not name.startswith("_") and name.islower()
}
