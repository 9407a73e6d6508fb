"""The system calls that a process may not make while it decodes media: a table, and no code.

It is a list of refusals. Decoders and torch use calls that differ by version, and a list of permissions would end
innocent items with each upgrade. So that nothing new slips in, calls with numbers above the known ones are refused too.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

__all__ = ["Rule", "Word", "rules_for"]

_WRITES: Final = 0o1 | 0o2 | 0o100 | 0o1000  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC
_CLONE_THREAD: Final = 0x10000
_SHARED_ANONYMOUS: Final = 0x1 | 0x20  # MAP_SHARED, MAP_ANONYMOUS: RLIMIT_DATA counts private memory only
_TERMINAL: Final = (0x5412, 0x541C)  # TIOCSTI and TIOCLINUX type into the operator's terminal
_SIGNAL_OWNERS: Final = (8, 10, 15)  # F_SETOWN, F_SETSIG and F_SETOWN_EX let the kernel signal another process


@dataclass(frozen=True, slots=True)
class Word:
    """A condition on 32 bits of an argument."""

    argument: int
    value: int = 0
    mask: int = 0xFFFF_FFFF
    is_high: bool = False
    """Whether it is about the upper half."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Calls that are refused: always, unless all of some words hold, or only if one of some words holds."""

    names: tuple[str, ...]
    error: int = errno.EPERM
    unless: tuple[Word, ...] = ()
    only_if: tuple[Word, ...] = ()


def rules_for(pid: int) -> tuple[Rule, ...]:
    """Return the rules for the process of this number."""
    itself = Word(0, pid)
    return (
        # No other program and no other process; threads are made by `clone`, to which libc falls back.
        _deny("fork vfork execve execveat unshare setns"),
        Rule(("clone",), unless=(Word(0, _CLONE_THREAD, _CLONE_THREAD),)),
        _deny("clone3", errno.ENOSYS),
        # No network. The pipe to the pool is there already, and needs none of these.
        _deny("socket socketpair connect bind listen accept accept4 sendmsg sendmmsg recvmsg recvmmsg"),
        # Nothing about other processes. `abort` signals itself.
        Rule(("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"), unless=(itself,)),
        _deny("tkill pidfd_open pidfd_getfd pidfd_send_signal ptrace process_vm_readv process_vm_writev"),
        _deny("process_madvise process_mrelease kcmp move_pages migrate_pages"),
        _deny("setpriority ioprio_set"),
        Rule(("sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"), unless=(Word(0),)),
        Rule(("fcntl",), only_if=_any_of(1, _SIGNAL_OWNERS)),
        Rule(("ioctl",), only_if=_any_of(1, _TERMINAL)),
        # No writes, also where there is no Landlock, and what Landlock does not know: modes, owners, times, attributes.
        Rule(("open",), errno.EACCES, unless=(Word(1, 0, _WRITES),)),
        Rule(("openat",), errno.EACCES, unless=(Word(2, 0, _WRITES),)),
        _deny("openat2", errno.ENOSYS),
        _deny("creat truncate unlink unlinkat rename renameat renameat2 link linkat symlink symlinkat", errno.EACCES),
        _deny("ftruncate fallocate mkdir mkdirat rmdir mknod mknodat", errno.EACCES),
        _deny("chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat", errno.EACCES),
        _deny("utime utimes futimesat utimensat setxattr lsetxattr fsetxattr", errno.EACCES),
        _deny("removexattr lremovexattr fremovexattr name_to_handle_at open_by_handle_at", errno.EACCES),
        # No memory and no queues that the limits do not count.
        _deny("memfd_create memfd_secret shmget shmat semget msgget mq_open"),
        Rule(("mmap",), only_if=(Word(3, _SHARED_ANONYMOUS, _SHARED_ANONYMOUS),)),
        # Its limits and its user stay as they are.
        _deny("setrlimit"),
        Rule(("prlimit64",), unless=(Word(2), Word(2, is_high=True))),
        _deny("setuid setgid setreuid setregid setresuid setresgid setgroups setfsuid setfsgid capset personality"),
        # Parts of the kernel that no decoder needs.
        _deny("io_uring_setup io_uring_enter io_uring_register bpf perf_event_open userfaultfd"),
        _deny("keyctl add_key request_key inotify_init inotify_init1 fanotify_init lookup_dcookie"),
        _deny("mount umount2 pivot_root chroot open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr"),
        _deny("statmount listmount swapon swapoff quotactl quotactl_fd"),
        _deny("init_module finit_module delete_module kexec_load kexec_file_load reboot acct syslog vhangup"),
        _deny("settimeofday clock_settime adjtimex clock_adjtime sethostname setdomainname iopl ioperm modify_ldt"),
    )


def _deny(names: str, error: int = errno.EPERM) -> Rule:
    return Rule(tuple(names.split()), error)


def _any_of(argument: int, values: Iterable[int]) -> tuple[Word, ...]:
    return tuple(Word(argument, value) for value in values)
