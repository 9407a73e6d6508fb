"""Engines: the protocol, and in `semel.engine.vllm` all contact with vLLM."""

from semel.engine.protocol import Engine, HoldingWatcher, Output, Stream, Submission

__all__ = ["Engine", "HoldingWatcher", "Output", "Stream", "Submission"]
