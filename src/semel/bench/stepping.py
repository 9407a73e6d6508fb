"""vLLM's scheduler without an engine: requests go in, steps are planned and answered by hand.

For what an engine would hide: what a step costs, and which step goes wrong. No model runs; every request is answered
with the same token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from semel.engine.vllm.compat import encoder_arguments

__all__ = ["Kind", "Stepper"]

Kind = Literal["stock", "cache", "planning"]
"""vLLM as it is, with semel's encoder cache, or with its encoder cache and its planning."""

_BLOCK_TOKENS = 16


class Stepper:
    """One scheduler, stepped by hand."""

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
        **engine_arguments: Any,
    ) -> Stepper:
        """A scheduler of `kind` for the model in a folder."""
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        config = EngineArgs(
            model=str(model),
            dtype="float32",
            enforce_eager=True,
            max_num_batched_tokens=tokens_per_step,
            enable_prefix_caching=False,
            **({} if kind == "stock" else encoder_arguments(with_scheduler=kind == "planning")),
            **engine_arguments,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = kv_blocks
        scheduler_class = config.scheduler_config.get_scheduler_cls() if kind == "planning" else Scheduler
        kv_cache = _kv_cache_config(kv_blocks)
        return cls(scheduler_class(config, kv_cache, StructuredOutputManager(config), block_size=_BLOCK_TOKENS))

    def add(
        self,
        name: str,
        items: Sequence[tuple[str, int, int]],
        *,
        tokens: int,
        max_new_tokens: int = 4,
        priority: int = 0,
    ) -> Any:
        """Add a request of so many prompt tokens with items, each `(identifier, offset, length)`."""
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        request = Request(
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
        self.scheduler.add_request(request)
        return request

    def plan(self) -> Any:
        """Plan one step."""
        return self.scheduler.schedule()

    def answer(self, output: Any) -> None:
        """Answer a step: a token for every request whose prompt is computed."""
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[[1] if r.num_computed_tokens >= r.num_tokens else [] for r in requests],
            ),
        )


def _kv_cache_config(blocks: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=_BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.float32)
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
