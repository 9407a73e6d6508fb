"""The machine: shared memory, free memory, ports, the sandbox; found out before vLLM has loaded and finds out."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from semel.cli.checks.engine_flags import EngineFlags
from semel.cli.checks.finding import Finding, problem_of
from semel.core.flag import GIB, MIB
from semel.engine.vllm.compat.versions import installed_version, is_cpu_build
from semel.processing.sandbox import Sandbox, kernel_sandbox
from semel.web.listener import bind

__all__ = [
    "Endpoint",
    "Memory",
    "check_memory",
    "check_ports",
    "check_sandbox",
    "check_shared_memory",
    "check_socket_folder",
    "engine_ranks",
    "gpu_memory",
]

_SHARED: Final = Path("/dev/shm")  # noqa: S108
_NEEDED_SHARED_BYTES: Final = 160 * MIB
"""For vLLM's queue between the processes of one engine."""

_UTILIZATION: Final = 0.92
_QUERY: Final = ("nvidia-smi", "--query-gpu=index,memory.total,memory.free", "--format=csv,noheader,nounits")
_QUERY_S: Final = 3.0
_CGROUP: Final = Path("/sys/fs/cgroup")
_SANDBOX_REMEDY: Final = (
    "decoders run with the rights of the frontend's user; use Linux 5.13 or later with Landlock switched on, and a "
    "container profile that allows its calls"
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A port that a process will listen on, and the flags that say so."""

    host: str
    port: int
    port_flag: str = "--port"
    host_flag: str = "--host"


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a device, in bytes."""

    name: str
    total: int
    available: int


def check_ports(endpoints: Iterable[Endpoint]) -> Iterator[Finding]:
    """Report addresses that cannot be served at: taken, not this machine's, or named twice."""
    seen: dict[int, Endpoint] = {}
    for one in endpoints:
        first = seen.setdefault(one.port, one) if one.port else one
        if first is not one and (one.host == first.host or {one.host, first.host} & {"0.0.0.0", "::"}):  # noqa: S104
            detail = f"{first.port_flag} and {one.port_flag} are both {one.port}"
            yield Finding("port", "problem", detail, f"choose another port with {one.port_flag}")
            continue
        faults = list(problem_of("port", lambda: bind(one.host, one.port, one.port_flag, one.host_flag).close()))  # noqa: B023
        yield from faults or [Finding("port", "ok", f"{one.host}:{one.port} is free")]


def check_socket_folder() -> Finding:
    """Check that sockets can be made."""
    folder = Path(tempfile.gettempdir())
    if not os.access(folder, os.W_OK):
        return Finding("sockets", "problem", f"{folder} is not writable", "set TMPDIR to a folder that is")
    return Finding("sockets", "ok", f"in {folder}")


def check_sandbox(*, required: bool = False, found: Sandbox | None = None) -> Finding:
    """Check the layers: a missing one is a problem where the sandbox is required, and a warning elsewhere."""
    sandbox = found or kernel_sandbox()
    if sandbox.is_whole:
        return Finding("sandbox", "ok", str(sandbox))
    detail = f"{'--require-sandbox: ' if required else ''}{sandbox}"
    return Finding("sandbox", "problem" if required else "warning", detail, _SANDBOX_REMEDY)


def check_shared_memory(flags: EngineFlags | None = None, *, workers: int = 1, folder: Path = _SHARED) -> Finding:
    """Check that vLLM's processes have room for what they share."""
    if not folder.is_dir():
        return Finding("shared memory", "warning", f"no {folder}", "vLLM's processes need it: mount a tmpfs there")
    free, needed = shutil.disk_usage(folder).free, _NEEDED_SHARED_BYTES * workers
    if free >= needed:
        return Finding("shared memory", "ok", f"{free / GIB:.1f} GiB free")
    detail = (
        f"{folder} has {free / MIB:.0f} MiB free, and vLLM's processes need {needed / MIB:.0f} MiB of shared memory"
    )
    certain = is_cpu_build() or engine_ranks(flags) > 1
    remedy = f"enlarge it: `docker run --shm-size 2g`, `mount -o remount,size=2g {folder}`"
    return Finding("shared memory", "problem" if certain else "warning", detail, remedy)


def check_memory(flags: EngineFlags | None = None, *, workers: int = 1) -> Iterator[Finding]:
    """Check that there is as much free memory as vLLM is going to ask for."""
    flags = flags or EngineFlags()
    if not installed_version():
        return
    if is_cpu_build():
        yield from _check_host_memory(flags, host_memory(), workers)
    else:
        devices = gpu_memory()
        yield from (_check_gpu(flags, one) for one in devices[: max(1, engine_ranks(flags)) * workers])


def host_memory() -> list[Memory]:
    """Return the memory of this host, or of its container; nothing if it has several nodes.

    The kernel and its only node may differ, where memory is added while it is used: then either may be right.
    """
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*/meminfo"))
    tables = [_meminfo(Path("/proc/meminfo")), *map(_meminfo, nodes)] if len(nodes) < 2 else []
    limit = _number(_CGROUP / "memory.max") or _number(_CGROUP / "memory/memory.limit_in_bytes")
    used = _number(_CGROUP / "memory.current") or _number(_CGROUP / "memory/memory.usage_in_bytes") or 0
    found = []
    for fields in tables:
        total = fields.get("MemTotal", 0)
        available = sum(fields.get(name, 0) for name in ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable"))
        if limit is not None and limit < total:
            total, available = limit, min(available, max(0, limit - used))
        if total:
            found.append(Memory("this machine", total, available))
    return found


def gpu_memory() -> list[Memory]:
    """Return the memory of each GPU that may be used; none if nobody tells."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_S, check=True)  # noqa: S603 no input
    except (OSError, subprocess.SubprocessError):
        return []
    found: dict[str, Memory] = {}
    for line in done.stdout.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 3 and parts[1].isdigit() and parts[2].isdigit():
            found[parts[0]] = Memory(f"GPU {parts[0]}", int(parts[1]) * MIB, int(parts[2]) * MIB)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = found if visible is None else [one.strip() for one in visible.split(",")]
    return [found[one] for one in chosen if one in found]


def _check_host_memory(flags: EngineFlags, known: Sequence[Memory], workers: int) -> Iterator[Finding]:
    faults = [fault for one in known if (fault := _host_fault(flags, one, workers)) is not None]
    if known and len(faults) == len(known):
        yield faults[0]
    elif known:
        yield Finding("memory", "ok", f"{_gib(known[0].available)} of {_gib(known[0].total)} free")


def _host_fault(flags: EngineFlags, memory: Memory, workers: int) -> Finding | None:
    cache = _cache_bytes(flags, os.environ)
    if cache is None:
        return _check_share(flags, memory, workers)
    if cache * workers <= memory.available:
        return None
    detail = f"a KV cache of {_gib(cache * workers)} does not fit: {memory.name} has {_gib(memory.available)} free"
    return Finding("memory", "problem", detail, "choose less with --kv-cache-memory-bytes (VLLM_CPU_KVCACHE_SPACE)")


def _check_share(flags: EngineFlags, memory: Memory, workers: int) -> Finding | None:
    share = _share(flags)
    wanted = share * memory.total * workers
    if wanted <= memory.available:
        return None
    each = f" for each of {workers} workers" if workers > 1 else ""
    detail = (
        f"vLLM would take {share:.0%} of the memory{each} ({_gib(wanted)}), and {memory.name} has "
        f"{_gib(memory.available)} of {_gib(memory.total)} free"
    )
    fits = int(0.9 * memory.available / memory.total / workers * 100) / 100
    return Finding("memory", "problem", detail, f"add --kv-cache-memory-bytes 1G, or --gpu-memory-utilization {fits:g}")


def _check_gpu(flags: EngineFlags, memory: Memory) -> Finding:
    share = _share(flags)
    if share * memory.total <= memory.available or flags.text("--kv-cache-memory-bytes"):
        return Finding("memory", "ok", f"{memory.name}: {_gib(memory.available)} of {_gib(memory.total)} free")
    detail = (
        f"vLLM would take {share:.0%} of {memory.name} ({_gib(share * memory.total)}), and {_gib(memory.available)} of "
        f"{_gib(memory.total)} are free"
    )
    fits = int(memory.available / memory.total * 100) / 100
    return Finding("memory", "problem", detail, f"end what uses it, or add --gpu-memory-utilization {fits:g}")


def _share(flags: EngineFlags) -> float:
    share = flags.number("--gpu-memory-utilization")
    return _UTILIZATION if share is None else share


def _cache_bytes(flags: EngineFlags, environment: Mapping[str, str]) -> float | None:
    """Return the size of the KV cache where it is set; the variable counts before the flag."""
    text = environment.get("VLLM_CPU_KVCACHE_SPACE", "")
    return float(text) * GIB if text.isdigit() else flags.number("--kv-cache-memory-bytes")


def engine_ranks(flags: EngineFlags | None) -> int:
    """Count the devices of one engine."""
    flags = flags or EngineFlags()
    return int((flags.number("--tensor-parallel-size") or 1) * (flags.number("--pipeline-parallel-size") or 1))


def _meminfo(path: Path) -> dict[str, int]:
    """Read a table of the kernel's, in bytes: `MemTotal: 1 kB`, or `Node 0 MemTotal: 1 kB`."""
    try:
        words = [line.split() for line in path.read_text().splitlines() if line.endswith("kB")]
    except OSError:
        return {}
    return {line[-3].rstrip(":"): int(line[-2]) * 1024 for line in words}


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f} GiB"
