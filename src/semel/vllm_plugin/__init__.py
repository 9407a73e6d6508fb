"""semel inside plain vLLM: `SEMEL=1 vllm serve …` (docs/deploy/plain-vllm.md).

vLLM calls `register` in every one of its processes, because the package is installed. Without `SEMEL` nothing else of
semel is imported, and nothing changes.
"""

from __future__ import annotations

import contextlib
import os
import sys

__all__ = ["register"]


def register() -> None:
    """Open the door as far as `SEMEL` says; the entry point of `vllm.general_plugins`. It never raises."""
    setting = os.environ.get("SEMEL", "").strip()
    if setting in ("", "0"):
        return
    try:
        from semel.vllm_plugin.levels import open_door

        open_door(setting)
    except Exception as error:  # noqa: BLE001 (whatever it is, vLLM runs as it is)
        with contextlib.suppress(Exception):
            reason = f"{type(error).__name__}: {error}"
            sys.stderr.write(f"semel: the door stays shut, and vLLM runs as it is: {reason}\n")
