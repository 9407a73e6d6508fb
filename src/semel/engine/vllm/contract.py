"""The contract of a running vLLM engine: what it expects of features, and what its answers depend on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from semel.core import Contract
from semel.engine.vllm.model.model import VllmModel
from semel.engine.vllm.requests.answer_settings import answer_settings
from semel.engine.vllm.requests.parsing import ParserFlags
from semel.processing.probes import proven_fingerprint, run_probes
from semel.processing.processor import Processor

__all__ = ["build_contract"]


def build_contract(
    llm: Any,
    model: VllmModel,
    processor: Processor,
    folder: Path,
    parsers: ParserFlags,
    *,
    cache_bytes: int,
    aliases: tuple[str, ...],
) -> Contract:
    """Build the contract of an `AsyncLLM` whose features come from this processor of a model folder. Takes a second."""
    config, probes = llm.model_config, run_probes(processor)
    return Contract(
        model=config.served_model_name or config.model,
        fingerprint=proven_fingerprint(processor.fingerprint, probes),
        target=model.target,
        fields={modality: model.fields(modality) for modality in model.max_items},
        max_items=model.max_items,
        max_embeds=llm.input_processor.mm_encoder_cache_size,
        max_tokens=config.max_model_len,
        cache_bytes=cache_bytes,
        needs_seal=model.needs_seal,
        aliases=aliases,
        probes=probes,
        answers=answer_settings(llm, parsers, folder, model.target.rendering),
    )
