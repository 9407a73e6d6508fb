"""A head of EAGLE-3 for the tiny LLaVA, with random weights: it drafts tokens that are mostly refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import numpy as np

from semel.lab.testing.models.text import HIDDEN_SIZE, VOCABULARY_TOKENS, text_config

__all__ = ["write_head"]

_POSITIONS: Final = 32_768
_HEAD_WIDTH: Final = HIDDEN_SIZE // 2


def write_head(folder: Path) -> Path:
    """Write the folder of the head. It sees the hidden states before the second of the model's two layers."""
    from safetensors.numpy import save_file

    inner, rng = 2 * HIDDEN_SIZE, np.random.default_rng(0)
    config = {
        **text_config(_POSITIONS, bos=1, eos=2, model_type="llama", rms_norm_eps=1e-5),
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": VOCABULARY_TOKENS,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1]},
    }
    shapes = {
        "midlayer.self_attn.q_proj.weight": (HIDDEN_SIZE, 2 * HIDDEN_SIZE),
        "midlayer.self_attn.k_proj.weight": (_HEAD_WIDTH, 2 * HIDDEN_SIZE),
        "midlayer.self_attn.v_proj.weight": (_HEAD_WIDTH, 2 * HIDDEN_SIZE),
        "midlayer.self_attn.o_proj.weight": (HIDDEN_SIZE, HIDDEN_SIZE),
        "midlayer.mlp.gate_proj.weight": (inner, HIDDEN_SIZE),
        "midlayer.mlp.up_proj.weight": (inner, HIDDEN_SIZE),
        "midlayer.mlp.down_proj.weight": (HIDDEN_SIZE, inner),
        "fc.weight": (HIDDEN_SIZE, HIDDEN_SIZE),
        "lm_head.weight": (VOCABULARY_TOKENS, HIDDEN_SIZE),
    }
    tensors = {name: (rng.normal(0, shape[1] ** -0.5, shape)).astype(np.float32) for name, shape in shapes.items()}
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    tensors |= {f"{name}.weight": np.ones(HIDDEN_SIZE, np.float32) for name in norms}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
