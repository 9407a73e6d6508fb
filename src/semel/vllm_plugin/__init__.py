"""semel inside plain vLLM: `SEMEL=1 vllm serve …` (docs/deploy/plain-vllm.md).

vLLM calls `register` in every one of its processes, because the package is installed. Without `SEMEL` nothing else of
semel is imported, and nothing changes.
"""

from __future__ import annotations

import os

__all__ = ["register"]


def register() -> None:
    """Open the door as far as `SEMEL` says; the entry point of `vllm.general_plugins`. It never raises."""
    setting = os.environ.get("SEMEL", "").strip()
    if setting in ("", "0"):
        return
    from semel.vllm_plugin.levels import open_door

    open_door(setting)
