"""Engines: the protocol, and in `semel.engine.vllm` all contact with vLLM."""

from semel.engine.protocol import Engine, EngineControl, ItemCacheWatcher, Stream

__all__ = ["Engine", "EngineControl", "ItemCacheWatcher", "Stream"]
