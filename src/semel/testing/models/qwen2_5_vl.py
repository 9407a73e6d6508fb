"""A tiny Qwen2.5-VL: as Qwen2-VL, but its tower has window attention, and its positions depend on time."""

from __future__ import annotations

from pathlib import Path

from semel.testing.models.qwen2_vl import Variant, write_variant
from semel.testing.models.text import HIDDEN_SIZE

__all__ = ["write"]


def write(directory: Path) -> None:
    """Write the model folder into `directory`, which exists."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

    tower = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": HIDDEN_SIZE,
        "window_size": 56,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    }
    variant = Variant("qwen2.5-vl", Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor, tower)
    write_variant(variant, directory)
