"""Our gathering against vLLM's own, on the same inputs."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.core import Timeline
from semel.encoder.gather import gather
from tests.encoder.test_gather import timelines

pytestmark = pytest.mark.engine


def vllm_runner(batch: list[tuple[Timeline, int]], outputs: dict[str, Any]) -> Any:
    """The little of a model runner that its gathering reads."""
    import torch
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def feature(request: int, index: int, timeline: Timeline) -> MultiModalFeatureSpec:
        placeholder = timeline[index]
        mask = placeholder.mask and torch.tensor(list(placeholder.mask.bits), dtype=torch.bool)
        place = PlaceholderRange(placeholder.offset, placeholder.length, mask)
        return MultiModalFeatureSpec(data=None, modality="image", identifier=f"{request}.{index}", mm_position=place)

    requests = {
        str(request): SimpleNamespace(
            num_computed_tokens=computed,
            mm_features=[feature(request, index, timeline) for index in range(len(timeline))],
        )
        for request, (timeline, computed) in enumerate(batch)
    }
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=list(requests)),
        requests=requests,
        is_multimodal_pruning_enabled=False,
        uses_mrope=False,
        _get_encoder_output_from_cache=outputs.get,
    )
    runner.gather = lambda step, shift: GPUModelRunner._gather_mm_embeddings(runner, step, shift)
    return runner


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(timelines(), st.integers(0, 30), st.integers(1, 20)), min_size=1, max_size=3), st.integers(0, 2)
)
def test_c5_slices_and_mask_are_those_of_vllm(batch: list[tuple[Timeline, int, int]], shift: int) -> None:
    import torch

    counter = itertools.count()
    outputs = {
        f"{request}.{index}": torch.tensor([[next(counter)] for _ in range(placeholder.num_embeds)])
        for request, (timeline, _, _) in enumerate(batch)
        for index, placeholder in enumerate(timeline)
    }
    runner = vllm_runner([(timeline, computed) for timeline, computed, _ in batch], outputs)
    tokens = {str(request): tokens for request, (_, _, tokens) in enumerate(batch)}
    step = SimpleNamespace(total_num_scheduled_tokens=sum(tokens.values()), num_scheduled_tokens=tokens)
    theirs, their_mask = runner.gather(step, shift)

    ours, our_mask = [], b""
    for request, (timeline, computed, length) in enumerate(batch):
        gathered = gather(timeline, computed + shift, computed + shift + length)
        ours += [outputs[f"{request}.{piece.index}"][piece.start : piece.end] for piece in gathered.slices]
        our_mask += gathered.mask
    assert [piece.tolist() for piece in ours] == [piece.tolist() for piece in theirs]
    assert list(our_mask) == their_mask.int().tolist()
