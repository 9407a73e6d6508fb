"""Engines: the protocol, and in `semel.engine.vllm` all contact with vLLM."""

from semel.engine.protocol import Engine, EngineAdapters, EngineControl, ItemCacheWatcher, Stream

__all__ = ["Engine", "EngineAdapters", "EngineControl", "ItemCacheWatcher", "Stream"]
