"""LoRA adapters with random weights, in PEFT's layout, for a tiny model's language layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

__all__ = ["build_adapter"]

_MODULES: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv", "attn.proj")
_NAMES: Final = tuple(one.rpartition(".")[2] for one in _MODULES)
_RANK: Final = 4
_SCALE: Final = 0.3
"""Large enough to change most answers."""


def build_adapter(
    model: Path, folder: Path, seed: int, *, rank: int = _RANK, language: bool = True, tower: bool = False
) -> Path:
    """Write an adapter for the attention in a tiny Qwen2-VL's language model and its encoder; returns its folder."""
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for file in sorted(model.glob("*.safetensors")):
        for name, weight in load_file(file).items():
            is_wanted = tower if "visual" in name else language
            if is_wanted and name.endswith(tuple(f".{one}.weight" for one in _MODULES)):
                stem = f"base_model.model.{name.removesuffix('.weight')}"
                rows, columns = weight.shape
                tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) * _SCALE
                tensors[f"{stem}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * _SCALE
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": _NAMES,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(model)}))
    return folder
