"""Start of the pool's programs: interpreter, descriptors, and an environment without secrets (threats S23)."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from semel.telemetry.logs import is_json

__all__ = ["CANNOT_FORK", "child_environment", "log_words", "start"]

# A list of what to pass on: one of what to leave out (keys, tokens, credentials) would forget something (threats S23).
_NAMES: Final = frozenset(
    {"ALL_PROXY", "CONDA_PREFIX", "CURL_CA_BUNDLE", "GLIBC_TUNABLES", "HOME", "HTTPS_PROXY", "HTTP_PROXY", "LANG"}
    | {"LD_LIBRARY_PATH", "LD_PRELOAD", "LOGNAME", "NO_PROXY", "PATH", "REQUESTS_CA_BUNDLE", "SSL_CERT_DIR"}
    | {"SSL_CERT_FILE", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV", "XDG_CACHE_HOME"}
)
"""In capitals: proxies are written in small letters too. A processor's files may have to be fetched while it loads."""

_PREFIXES: Final = (
    *("ATEN_", "HF_", "KMP_", "LC_", "MALLOC_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_"),
    *("PYTHON", "TORCH_", "TRANSFORMERS_", "VLLM_"),
)
_SECRETS: Final = ("AUTH", "CREDENTIAL", "KEY", "PASSWORD", "SECRET", "TOKEN")
"""Parts of names that are not passed on, whatever they begin with: `HF_TOKEN`, `VLLM_API_KEY`."""

_ALWAYS: Final = {
    "CUDA_VISIBLE_DEVICES": "",  # a request's options can name a device; there is none but the CPU
    # Buffers of images stay with the process instead of going back to the kernel after each: that was 600 page faults,
    # 1.5 ms of 20 for an image of 1024×1024.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PILLOW_BLOCK_SIZE": str(1 << 30),  # the pixels of an image in one piece, which can be lent to torch
    "TOKENIZERS_PARALLELISM": "false",
}


def child_environment(ours: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a pool process."""
    return {name: value for name, value in ours.items() if _is_passed_on(name, value)} | _ALWAYS


def _is_passed_on(name: str, value: str) -> bool:
    if name.upper() in _NAMES:
        return not (name.upper().endswith("_PROXY") and "@" in value)  # a password stands before the @
    return name.startswith(_PREFIXES) and not any(secret in name for secret in _SECRETS)


CANNOT_FORK: Final = 3
"""The exit status of a fork server that cannot fork, and would not the next time either."""

_SET_DEATH_SIGNAL: Final = 1
_COMMAND: Final = (sys.executable, "-P", "-m")


async def start(module: str, descriptors: Sequence[int], words: Sequence[str]) -> Process:
    """Start a module as a program. Its arguments are the descriptors, which it has open, and then the words."""
    return await asyncio.create_subprocess_exec(
        *_COMMAND,
        module,
        *map(str, descriptors),
        *words,
        stdin=DEVNULL,
        stdout=DEVNULL,
        env=child_environment(os.environ),
        pass_fds=descriptors,
        preexec_fn=partial(_begin, ctypes.CDLL(None).prctl, os.getpid()),
    )


def _begin(prctl: Any, parent: int) -> None:
    """Lead a group, as Ctrl-C is for the pool, and end with the pool: a program that still imports reads no pipe."""
    os.setpgrp()
    prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def log_words() -> tuple[str, ...]:
    """Return the words that have a program log as we do."""
    return ("json",) if is_json() else ()
