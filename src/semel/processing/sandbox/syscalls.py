"""Numbers of system calls by architecture: only of those that a rule or this package names."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["AARCH64", "ARCHITECTURES", "X86_64", "Architecture", "this_architecture"]

_LAST: Final = 462
"""`mseal` of Linux 6.10. Both architectures number alike what came after 424."""

_TABLE: Final = """
    clone 56/220, clone3 435, fork 57/-, vfork 58/-, execve 59/221, execveat 322/281, unshare 272/97, setns 308/268,
    socket 41/198, socketpair 53/199, connect 42/203, bind 49/200, listen 50/201, accept 43/202, accept4 288/242,
    sendmsg 46/211, sendmmsg 307/269, recvmsg 47/212, recvmmsg 299/243, kill 62/129, tkill 200/130, tgkill 234/131,
    rt_sigqueueinfo 129/138, rt_tgsigqueueinfo 297/240, pidfd_open 434, pidfd_getfd 438, pidfd_send_signal 424,
    ptrace 101/117, process_vm_readv 310/270, process_vm_writev 311/271, process_madvise 440, process_mrelease 448,
    kcmp 312/272, move_pages 279/239, migrate_pages 256/238, open 2/-, openat 257/56, openat2 437, creat 85/-,
    truncate 76/45, ftruncate 77/46, fallocate 285/47, unlink 87/-, unlinkat 263/35, rename 82/-, renameat 264/38,
    renameat2 316/276, link 86/-, linkat 265/37, symlink 88/-, symlinkat 266/36, mkdir 83/-, mkdirat 258/34,
    rmdir 84/-, mknod 133/-, mknodat 259/33, chmod 90/-, fchmod 91/52, fchmodat 268/53, fchmodat2 452, chown 92/-,
    fchown 93/55, lchown 94/-, fchownat 260/54, utime 132/-, utimes 235/-, futimesat 261/-, utimensat 280/88,
    setxattr 188/5, lsetxattr 189/6, fsetxattr 190/7, removexattr 197/14, lremovexattr 198/15, fremovexattr 199/16,
    mount 165/40, umount2 166/39, pivot_root 155/41, chroot 161/51, open_tree 428, move_mount 429, fsopen 430,
    fsconfig 431, fsmount 432, fspick 433, mount_setattr 442, statmount 457, listmount 458, swapon 167/224,
    swapoff 168/225, quotactl 179/60, quotactl_fd 443, io_uring_setup 425, io_uring_enter 426, io_uring_register 427,
    bpf 321/280, perf_event_open 298/241, userfaultfd 323/282, keyctl 250/219, add_key 248/217, request_key 249/218,
    mmap 9/222, memfd_create 319/279, memfd_secret 447, shmget 29/194, shmat 30/196, semget 64/190, msgget 68/186,
    mq_open 240/180, inotify_init 253/-, inotify_init1 294/26, fanotify_init 300/262, name_to_handle_at 303/264,
    open_by_handle_at 304/265, init_module 175/105, finit_module 313/273, delete_module 176/106, kexec_load 246/104,
    kexec_file_load 320/294, reboot 169/142, acct 163/89, settimeofday 164/170, clock_settime 227/112,
    adjtimex 159/171, clock_adjtime 305/266, sethostname 170/161, setdomainname 171/162, syslog 103/116,
    vhangup 153/58, iopl 172/-, ioperm 173/-, modify_ldt 154/-, personality 135/92, lookup_dcookie 212/18,
    setuid 105/146, setgid 106/144, setreuid 113/145, setregid 114/143, setresuid 117/147, setresgid 119/149,
    setgroups 116/159, setfsuid 122/151, setfsgid 123/152, capset 126/91, setrlimit 160/164, prlimit64 302/261,
    setpriority 141/140, ioprio_set 251/30, sched_setaffinity 203/122, sched_setscheduler 144/119,
    sched_setparam 142/118, sched_setattr 314/274, fcntl 72/25, ioctl 16/29
"""
"""Names with their numbers on x86_64 and, after the slash, on aarch64 if that has another number, or no such call."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The numbers that a filter needs about a CPU."""

    name: str
    """As `platform.machine()` says it."""

    audit: int
    """How the kernel names it in front of a filter."""

    seccomp: int
    """The number of `seccomp` itself."""

    numbers: Mapping[str, int]
    """Of the calls that rules name; a call that the architecture does not have is missing."""

    last: int = _LAST
    """The highest number that was known when the rules were written."""


def _numbers(column: int) -> Mapping[str, int]:
    """Read a column of the table: the last number stands for the rest."""
    rows = ((name, (*numbers.split("/"), numbers)[column]) for name, numbers in map(str.split, _TABLE.split(",")))
    return {name: int(number) for name, number in rows if number != "-"}


X86_64: Final = Architecture("x86_64", 0xC000003E, 317, _numbers(0))
AARCH64: Final = Architecture("aarch64", 0xC00000B7, 277, _numbers(1))
ARCHITECTURES: Final = (X86_64, AARCH64)


def this_architecture() -> Architecture | None:
    """Return the one that this process runs on, if there are numbers for it."""
    return next((one for one in ARCHITECTURES if one.name == platform.machine()), None)
