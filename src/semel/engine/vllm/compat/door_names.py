"""Every name of vLLM that only `semel.vllm_plugin` uses. The door stays shut with a vLLM that lacks one of them."""

from __future__ import annotations

from typing import Final

from semel.engine.vllm.compat.names import Name
from semel.engine.vllm.compat.names import names_of as _of

__all__ = ["DOOR_NAMES"]

DOOR_NAMES: Final[tuple[Name, ...]] = (
    # Lazy images.
    # The renderer.
    # Repair.
    # Engine parts.
    *_of("engine.arg_utils", "EngineArgs", "engine parts by default", "create_engine_config(usage_context)"),
    # A worker of a fleet.
)
