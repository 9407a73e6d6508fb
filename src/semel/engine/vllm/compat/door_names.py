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
    *_of("", "", "vLLM's engine for frontends", "plugins"),
    *_of("plugins", "", "vLLM's engine for frontends", "load_endpoint_plugins(supported_tasks)", since="0.32"),
    *_of(
        *("plugins.endpoint_plugins.interface", "EndpointPlugin", "vLLM's engine for frontends"),
        *("name", "required_tasks", "attach_router(app)", "init_state(engine_client, state, args)"),
        since="0.32",
    ),
    *_of("config", "VllmConfig", "time to drain", "shutdown_timeout", since="0.32"),
    *_of("utils.cache", "LRUCache", "two writers of the item cache", "touch(key)"),
    *_of("utils.cache", "LRUCache", "two writers of the item cache", "put_if_fits(key, value)", since="0.32"),
    *_of(
        *("multimodal.cache.base", "MultiModalProcessorCacheItemMetadata", "two writers of the item cache"),
        "prompt_updates",
    ),
)
