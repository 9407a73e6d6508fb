"""What a pool process gets of its frontend's environment: variables that are named here, and no others (threats S23).

An environment has API keys, tokens of the hub and credentials of media stores in it. A list of what to leave out would
forget one, so this is a list of what to pass on: where libraries and models are, and how they compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["child_environment"]

_NAMES: Final = frozenset(
    {
        "ALL_PROXY",
        "CONDA_PREFIX",
        "CURL_CA_BUNDLE",
        "GLIBC_TUNABLES",
        "HOME",
        "HTTPS_PROXY",
        "HTTP_PROXY",
        "LANG",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "LOGNAME",
        "NO_PROXY",
        "PATH",
        "REQUESTS_CA_BUNDLE",
        "SSL_CERT_DIR",
        "SSL_CERT_FILE",
        "TMPDIR",
        "TZ",
        "USER",
        "VIRTUAL_ENV",
        "XDG_CACHE_HOME",
    }
)
"""In capitals: proxies are written in small letters too. A processor's files may have to be fetched while it loads."""

_PREFIXES: Final = (
    "ATEN_",
    "HF_",
    "KMP_",
    "LC_",
    "MALLOC_",
    "MKL_",
    "OMP_",
    "ONEDNN_",
    "OPENBLAS_",
    "PYTHON",
    "TORCH_",
    "TRANSFORMERS_",
    "VLLM_",
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
    "TOKENIZERS_PARALLELISM": "false",
}


def child_environment(ours: Mapping[str, str]) -> dict[str, str]:
    """The environment of a pool process."""
    return {name: value for name, value in ours.items() if _is_passed_on(name, value)} | _ALWAYS


def _is_passed_on(name: str, value: str) -> bool:
    if name.upper() in _NAMES:
        return not (name.upper().endswith("_PROXY") and "@" in value)  # a password stands before the @
    return name.startswith(_PREFIXES) and not any(secret in name for secret in _SECRETS)
