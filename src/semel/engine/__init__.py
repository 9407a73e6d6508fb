"""Engines: the protocol, and in `semel.engine.vllm` all contact with vLLM."""

from semel.engine.protocol import Engine, Output, Stream, Submission

__all__ = ["Engine", "Output", "Stream", "Submission"]
