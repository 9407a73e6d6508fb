"""Positions of Qwen3-Omni's items in prompts in which no text follows one: vLLM's own computation, without weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from semel.engine.vllm.plugins.rope_positions import allow_bare_items

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

Items = list[tuple[str, int, tuple[int, int, int]]]


@pytest.fixture
def model() -> Any:
    from vllm.model_executor.models.qwen3_omni_moe_thinker import Qwen3OmniMoeThinkerForConditionalGeneration

    model = Qwen3OmniMoeThinkerForConditionalGeneration.__new__(Qwen3OmniMoeThinkerForConditionalGeneration)
    vision = SimpleNamespace(spatial_merge_size=2)
    model.__dict__["config"] = SimpleNamespace(vision_config=vision, position_id_per_seconds=13)
    return model


def features(*items: tuple[int, tuple[int, int, int]]) -> list[Any]:
    """Images of these grids at these offsets."""
    import torch
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        PlaceholderRange,
    )

    made = []
    for offset, grid in items:
        data = MultiModalKwargsItem(
            {"image_grid_thw": MultiModalFieldElem(torch.tensor(grid), MultiModalBatchedField(keep_on_cpu=True))}
        )
        length = grid[0] * grid[1] * grid[2] // 4
        made.append(MultiModalFeatureSpec(data, "image", "x", PlaceholderRange(offset=offset, length=length)))
    return made


def test_an_item_at_the_end_of_a_prompt_has_the_positions_of_one_before_text(model: Any) -> None:
    items = features((2, (1, 4, 6)))
    before_text, _ = model.get_mrope_input_positions([5] * 9, items)
    with pytest.raises(RuntimeError, match="length mismatch"):  # the control: vLLM by itself
        model.get_mrope_input_positions([5] * 8, items)
    allow_bare_items(model)
    positions, delta = model.get_mrope_input_positions([5] * 8, items)
    assert positions.equal(before_text[:, :8])
    assert delta == int(before_text[:, :8].max()) + 1 - 8
    assert model.get_mrope_input_positions([5] * 9, items)[0].equal(before_text)


def test_items_without_text_between_them_have_the_positions_of_items_with_a_token_between_them(model: Any) -> None:
    apart, _ = model.get_mrope_input_positions([5] * 14, features((0, (1, 4, 6)), (7, (1, 4, 4)), (12, (1, 2, 2))))
    allow_bare_items(model)
    positions, _ = model.get_mrope_input_positions([5] * 11, features((0, (1, 4, 6)), (6, (1, 4, 4)), (10, (1, 2, 2))))
    assert positions.equal(apart[:, [*range(6), *range(7, 11), 12]])


def test_other_mistakes_are_raised_as_before(model: Any) -> None:
    allow_bare_items(model)
    (item,) = features((2, (1, 4, 6)))
    item.mm_position = type(item.mm_position)(offset=2, length=3)
    with pytest.raises(RuntimeError, match="length mismatch"):
        model.get_mrope_input_positions([5] * 6, [item])
