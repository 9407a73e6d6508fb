"""Engines: the protocol, and in `semel.engine.vllm` all contact with vLLM."""

from semel.engine.protocol import Engine, HoldingWatcher, Output, PromptLogprob, Stream, Submission

__all__ = ["Engine", "HoldingWatcher", "Output", "PromptLogprob", "Stream", "Submission"]
