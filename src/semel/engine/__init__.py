"""Engines: the protocol, and in `semel.engine.vllm` all contact with vLLM."""

from semel.engine.protocol import Engine, HoldingWatcher, Stream

__all__ = ["Engine", "HoldingWatcher", "Stream"]
