"""vLLM's scheduler without an engine: requests are added, and steps are planned and answered one at a time.

It shows what an engine hides: the cost of a step, and which step is wrong. No model runs; every request is answered
with the same token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from semel.engine.vllm.compat.internals import encoder_arguments
from semel.engine.vllm.tier.config import settle_tier

__all__ = ["Kind", "Step", "Stepper"]

Kind = Literal["stock", "cache", "planning"]
"""vLLM unchanged, with semel's encoder cache, or with semel's encoder cache and planning."""

_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Step:
    """A planned step."""

    output: Any
    """The output of vLLM's scheduler for the model runner."""
    samples: dict[str, bool]
    """For each request of the step, whether it gets a token."""


class Stepper:
    """One scheduler that is stepped explicitly."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    @classmethod
    def create(
        cls,
        kind: Kind,
        model: Path,
        *,
        tokens_per_step: int = 8_192,
        kv_blocks: int = 16_384,
        encoder_embeds: int | None = None,
        is_async: bool = False,
        **engine_arguments: Any,
    ) -> Stepper:
        """Return a scheduler of `kind` for the model in a folder.

        `encoder_embeds` is the size of the encoder cache and of the encoder's budget per step; by default vLLM's own.
        An asynchronous scheduler may plan a step before the last one is answered.
        """
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.structured_output import StructuredOutputManager

        config = EngineArgs(
            model=str(model),
            dtype="float32",
            enforce_eager=True,
            max_num_batched_tokens=tokens_per_step,
            **(
                ({} if kind == "stock" else encoder_arguments(with_scheduler=kind == "planning"))
                | {"enable_prefix_caching": False}
                | engine_arguments
            ),
        ).create_engine_config()
        settle_tier(config)
        config.cache_config.num_gpu_blocks = kv_blocks
        config.scheduler_config.async_scheduling = is_async
        if encoder_embeds is not None:
            config.scheduler_config.encoder_cache_size = encoder_embeds
            config.scheduler_config.max_num_encoder_input_tokens = encoder_embeds
        create = config.scheduler_config.get_scheduler_cls()
        kv_cache = _kv_cache_config(kv_blocks)
        return cls(create(config, kv_cache, StructuredOutputManager(config), block_size=_BLOCK_TOKENS))

    @staticmethod
    def request(
        name: str, items: Sequence[tuple[str, int, int]], *, tokens: int, max_new_tokens: int = 4, priority: int = 0
    ) -> Any:
        """Return a request of `tokens` prompt tokens with items, each `(identifier, offset, length)`."""
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        return Request(
            name,
            prompt_token_ids=[0] * tokens,
            sampling_params=SamplingParams(max_tokens=max_new_tokens, ignore_eos=True),
            pooling_params=None,
            mm_features=[
                MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, length))
                for identifier, offset, length in items
            ],
            priority=priority,
        )

    def add(self, name: str, items: Sequence[tuple[str, int, int]], *, tokens: int, **options: int) -> Any:
        """Add a request; see `request`."""
        request = self.request(name, items, tokens=tokens, **options)
        self.scheduler.add_request(request)
        return request

    def plan(self) -> Step:
        """Plan one step."""
        output = self.scheduler.schedule()
        requests = self.scheduler.requests
        return Step(output, {name: not requests[name].is_prefill_chunk for name in output.num_scheduled_tokens})

    def answer(self, step: Step) -> None:
        """Answer a step: a token for every request whose prompt is now computed."""
        self.scheduler.update_from_output(step.output, self.result(step))

    def result(self, step: Step) -> Any:
        """Return what a model runner would make of a step."""
        from vllm.v1.outputs import ModelRunnerOutput

        return ModelRunnerOutput(
            req_ids=list(step.samples),
            req_id_to_index={name: index for index, name in enumerate(step.samples)},
            sampled_token_ids=[[1] if samples else [] for samples in step.samples.values()],
        )


def _kv_cache_config(blocks: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=_BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.float32)
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
