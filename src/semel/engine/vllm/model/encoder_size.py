"""Size of the encoder cache on the device, in embeddings and bytes.

vLLM fixes the size of its encoder cache to the tokens of a step (`--max-num-batched-tokens`), or to the largest item
where that is larger: five images of 1024² for a 7B model. The size is only a number: the outputs are tensors in a
dict of the model runner, and the encoder cache manager, which is semel's, decides which of them are dropped. So another
number there is all that it takes. vLLM profiles memory with its own one, hence the rest has to be left free on a GPU.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Self

from semel.engine.vllm.compat.internals import ENCODER_CACHE
from semel.errors import ConfigError

__all__ = ["EncoderCacheSize", "check_encoder_cache", "embedding_bytes", "log_encoder_cache"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EncoderCacheSize:
    """The size of an engine's encoder cache."""

    embeddings: int
    of_vllm: int
    """The embeddings that vLLM would have, and counts when it profiles the memory of a GPU."""
    embedding_bytes: int

    @classmethod
    def from_config(cls, vllm_config: Any, of_vllm: int) -> Self | None:
        """Compute it for an engine; None if it caches no encoder outputs, or by another manager than semel's."""
        model, manager = vllm_config.model_config, vllm_config.ec_manager_config
        if not model.supports_multimodal_inputs or model.is_encoder_decoder:
            return None
        if manager.encoder_cache_manager_cls != ENCODER_CACHE:
            return None
        embeddings = max(manager.manager_config.get("embeddings") or 0, of_vllm)
        return cls(embeddings, of_vllm, embedding_bytes(model))

    def __str__(self) -> str:
        text = (
            f"{self.embeddings:,} embeddings of {self.embedding_bytes:,} bytes each, "
            f"{self.embeddings * self.embedding_bytes / 1e6:,.1f} MB in each of vLLM's worker processes"
        )
        extra = self.embeddings - self.of_vllm
        if not extra:
            return text
        return (
            f"{text}; vLLM does not count {extra * self.embedding_bytes / 1e6:,.1f} MB of it: on a GPU, leave them "
            "free with --gpu-memory-utilization"
        )


def check_encoder_cache(vllm_config: Any) -> None:
    """Refuse an encoder cache that is smaller than vLLM's: a request whose item fits nowhere would wait for ever."""
    chosen = vllm_config.ec_manager_config.manager_config.get("embeddings")
    of_vllm = vllm_config.scheduler_config.encoder_cache_size
    if chosen is not None and chosen < of_vllm:
        raise ConfigError(
            f"--encoder-cache-embeddings {chosen:,} is less than the {of_vllm:,} that vLLM itself has: raise it, or "
            "lower --max-num-batched-tokens"
        )


def log_encoder_cache(llm: Any) -> None:
    """Say what the encoder cache of a running `AsyncLLM` may take."""
    size = EncoderCacheSize.from_config(llm.vllm_config, llm.input_processor.mm_encoder_cache_size)
    if size is not None:
        logger.info("the encoder cache holds %s", size)


def embedding_bytes(model_config: Any) -> int:
    """Return what one embedding takes. Some models put what several layers of their encoder made side by side."""
    vision = getattr(model_config.hf_config, "vision_config", None)
    layers = 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())
    return int(model_config.get_inputs_embeds_size() * layers * model_config.dtype.itemsize)
