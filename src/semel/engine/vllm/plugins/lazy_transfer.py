"""Lazy transfer of items from vLLM's engine core to its worker processes.

vLLM sends all tensors of all items of a request with the first step of that request, also where the encoder's output is
there already and nothing will read them: 6 MB for an image of 1024², at every repeat. Here an item's large tensors
travel with the step that encodes it, and only then.

The invariant: when a step encodes an item, the worker processes have all of it. It holds whatever becomes of the
encoder's output, since what matters is not what is resident but what a step says it encodes
(`scheduled_encoder_inputs`); an output that is evicted, or a request that is preempted, leads to such a step again. The
items that vLLM itself leaves out, because its prefix cache covers them, are brought back by the same rule.

What is left out is less than vLLM leaves out of covered items: not what models want on the CPU for their positions, and
nothing small. The worker processes' side is `worker`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import torch
from vllm.config.ec_manager_config import EncoderCacheManagerMetadata
from vllm.multimodal.inputs import MultiModalKwargsItem

from semel.engine.vllm.compat.internals import ENCODER_CACHE, LAZY_TRANSFER_WORKER
from semel.engine.vllm.tier.config import has_tier

__all__ = ["LateItems", "LazyTransfer", "Shipped"]

_LARGE_BYTES: Final = 64 * 1024
"""Smaller tensors always travel: models compute positions from some of them, and they cost next to nothing."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LateItems(EncoderCacheManagerMetadata):  # type: ignore[misc]
    """The items that a step encodes and whose requests came without them: request → index → item."""

    items: Mapping[str, Mapping[int, Any]]


@dataclass(frozen=True, slots=True)
class Shipped:
    """Bytes that one step, or all of them, left out and sent late."""

    left_out_bytes: int = 0
    """Bytes that vLLM would have sent."""
    late_bytes: int = 0
    """Bytes that had been left out, and were sent now."""

    def __add__(self, other: Shipped) -> Shipped:
        return Shipped(self.left_out_bytes + other.left_out_bytes, self.late_bytes + other.late_bytes)


class LazyTransfer:
    """The items that the worker processes have in part only."""

    def __init__(self) -> None:
        self._partial: dict[str, set[int]] = {}
        self.is_on = True
        """False if nothing is left out any more. What was left out before still follows."""

    @classmethod
    def from_config(cls, vllm_config: Any) -> Self | None:
        """Create it for worker processes that can take late items; else None, and one line of the log says why."""
        if vllm_config.parallel_config.worker_cls != LAZY_TRANSFER_WORKER:
            return None  # it was chosen so
        if (reason := _needlessness(vllm_config)) is not None:
            logger.info("lazy transfer of items is off, it would save nothing: %s", reason)
            return None
        if (reason := _hindrance(vllm_config)) is not None:
            logger.warning("every item is sent to the worker processes in full, as vLLM does: %s", reason)
            return None
        return cls()

    def ship(self, output: Any, requests: Mapping[str, Any]) -> Shipped:
        """Leave out of a step what it does not encode, and add what it encodes and was left out before."""
        assert output.ec_manager_metadata is None  # as with vLLM's own manager and with semel's
        for request_id in output.finished_req_ids:
            self._partial.pop(request_id, None)
        left_out = 0
        for new in output.scheduled_new_reqs:
            if new.mm_features and self.is_on:
                encoded = output.scheduled_encoder_inputs.get(new.req_id, ())
                left_out += self._lighten(new, requests[new.req_id].mm_features, encoded)
        late = self._late(output.scheduled_encoder_inputs, requests)
        if not late:
            return Shipped(left_out)
        output.ec_manager_metadata = LateItems(late)
        return Shipped(left_out, sum(_bytes(item.data) for items in late.values() for item in items.values()))

    def _lighten(self, new: Any, whole: list[Any], encoded: Collection[int]) -> int:
        """Return the bytes left out of a request that the worker processes see for the first time, or as if."""
        due, left_out, partial, sent = frozenset(encoded), 0, set(), []
        for index, feature in enumerate(new.mm_features):
            light = whole[index] if index in due else _light(feature)
            sent.append(light)
            if light is not whole[index]:
                partial.add(index)
                left_out += _bytes(feature.data) - _bytes(light.data)
        new.mm_features = sent
        self._partial[new.req_id] = partial
        return left_out

    def _late(self, encoded: Mapping[str, Collection[int]], requests: Mapping[str, Any]) -> dict[str, dict[int, Any]]:
        late = {}
        for request_id, indices in encoded.items():
            partial = self._partial.get(request_id)
            if partial and (due := partial.intersection(indices)):
                partial -= due
                features = requests[request_id].mm_features
                late[request_id] = {index: features[index] for index in sorted(due)}
        return late


def _needlessness(vllm_config: Any) -> str | None:
    """Why nothing large travels to worker processes anyway."""
    model = vllm_config.model_config
    if vllm_config.parallel_config.distributed_executor_backend == "uni":
        return "the engine has no worker processes of its own (--distributed-executor-backend is uni)"
    if not model.supports_multimodal_inputs:
        return "the model takes no items"
    if model.multimodal_config.mm_processor_cache_type == "shm":
        return "worker processes read items from shared memory (--mm-processor-cache-type is shm)"
    return None


def _hindrance(vllm_config: Any) -> str | None:
    """Why late items would not arrive, or nobody has seen that they do."""
    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend != "mp":
        return f"--distributed-executor-backend is {parallel.distributed_executor_backend}, not mp"
    if parallel.pipeline_parallel_size > 1:
        return "--pipeline-parallel-size is more than 1"
    if vllm_config.ec_manager_config.encoder_cache_manager_cls not in (None, ENCODER_CACHE):
        return "--ec-manager-config names an encoder cache that may send messages of its own to the worker processes"
    if vllm_config.ec_transfer_config is not None and not has_tier(vllm_config):
        return "--ec-transfer-config is set"
    if vllm_config.model_config.is_multimodal_raw_input_only_model:
        return "the model takes items as they are, without an encoder"
    return None


def _light(feature: Any) -> Any:
    """Return the item without its large tensors, or the item itself if it has none."""
    item = feature.data
    if item is None:
        return feature
    small = {name: part for name, part in item.items() if part.field.keep_on_cpu or _part_bytes(part) < _LARGE_BYTES}
    return feature if len(small) == len(item) else replace(feature, data=MultiModalKwargsItem(small))


def _bytes(item: Any) -> int:
    return 0 if item is None else sum(map(_part_bytes, item.values()))


def _part_bytes(part: Any) -> int:
    return _tensor_bytes(part.data)


def _tensor_bytes(data: Any) -> int:
    if isinstance(data, torch.Tensor):
        return int(data.nbytes)
    return sum(map(_tensor_bytes, data)) if isinstance(data, list | tuple) else 0
