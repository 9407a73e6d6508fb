"""Tiny models of Qwen3-VL and its kin: images and videos, each video frame after its time, features at several depths.

Qwen3.5 is a hybrid: every other layer is a gated delta network. vLLM's kernels for it on a CPU take bfloat16 and heads
of 128 channels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from semel.lab.testing.models import weights
from semel.lab.testing.models.declaration import Declaration, IdOf, Serving
from semel.lab.testing.models.text import CHATML, HIDDEN_SIZE, NORM_EPSILON, chat_template, text_config

if TYPE_CHECKING:
    from semel.lab.testing.models.weights import Tensors

__all__ = ["FAMILIES"]

_MAX_POSITIONS = 65_536
_SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_CHAT_TEMPLATE = chat_template(
    {
        "image": "<|vision_start|><|image_pad|><|vision_end|>",
        "video": "<|vision_start|><|video_pad|><|vision_end|>",
    },
    **CHATML,
)
_GAINS = {
    "*.patch_embed.proj.weight": 2.0,
    "*.pos_embed.weight": 8.0,
    "*.attn.qkv.weight": 1.5,
    "*.merger.linear_fc1.weight": 2.0,
    "*.merger.linear_fc2.weight": 2.0,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [12, 10, 10], "mrope_interleaved": True}


def _values(id_of: IdOf, *, text: dict[str, Any], tower: dict[str, Any]) -> dict[str, Any]:
    return {
        "dtype": "float32",
        "tie_word_embeddings": False,
        "image_token_id": id_of("<|image_pad|>"),
        "video_token_id": id_of("<|video_pad|>"),
        "vision_start_token_id": id_of("<|vision_start|>"),
        "vision_end_token_id": id_of("<|vision_end|>"),
        "text_config": text_config(
            _MAX_POSITIONS,
            **{
                "bos": id_of("<|endoftext|>"),
                "eos": id_of("<|im_end|>"),
                "head_dim": 64,
                "rms_norm_eps": NORM_EPSILON,
                "rope_parameters": _ROPE,
                "tie_word_embeddings": False,
                **text,
            },
        ),
        "vision_config": {
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "num_position_embeddings": 16**2,
            "out_hidden_size": HIDDEN_SIZE,
            "dtype": "float32",
            **tower,
        },
    }


def _qwen3_vl(id_of: IdOf) -> Any:
    from transformers import Qwen3VLConfig

    values = _values(id_of, text={}, tower={"deepstack_visual_indexes": [0, 1]})
    return Qwen3VLConfig(architectures=["Qwen3VLForConditionalGeneration"], **values)


def _qwen3_vl_moe(id_of: IdOf) -> Any:
    from transformers import Qwen3VLMoeConfig

    # vLLM reads norm_topk_prob, which the class of the configuration does not have by itself.
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}
    values = _values(id_of, text=experts, tower={"deepstack_visual_indexes": [0, 1]})
    return Qwen3VLMoeConfig(architectures=["Qwen3VLMoeForConditionalGeneration"], **values)


def _qwen3_5(id_of: IdOf) -> Any:
    from transformers import Qwen3_5Config

    text = {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2], "partial_rotary_factor": 0.25},
    }
    # Without the empty list vLLM builds mergers of deeper features, whose weights the model does not have.
    values = _values(id_of, text=text, tower={"deepstack_visual_indexes": []})
    return Qwen3_5Config(architectures=["Qwen3_5ForConditionalGeneration"], **values)


def _processor(tokenizer: Any) -> Any:
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    half, size = [0.5, 0.5, 0.5], {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 1_024}
    images = Qwen2VLImageProcessor(size=dict(size), patch_size=16, image_mean=half, image_std=half)
    videos = Qwen3VLVideoProcessor(size={**size, "longest_edge": 32 * 32 * 4_096})
    return Qwen3VLProcessor(images, tokenizer, videos, chat_template=_CHAT_TEMPLATE)


def _transposed_experts(tensors: Tensors) -> Tensors:
    """The published checkpoints have the matrices of experts with inputs before outputs."""
    import numpy as np

    return {
        name: np.ascontiguousarray(tensor.transpose(0, 2, 1)) if ".experts." in name else tensor
        for name, tensor in tensors.items()
    }


_QWEN3_VL = Declaration(
    family="qwen3-vl",
    config=_qwen3_vl,
    shapes=weights.of_class("Qwen3VLForConditionalGeneration"),
    processor=_processor,
    special_tokens=_SPECIAL_TOKENS,
    end="<|im_end|>",
    pad="<|endoftext|>",
    chat_template=_CHAT_TEMPLATE,
    gains=_GAINS,
    max_positions=_MAX_POSITIONS,
    serving=Serving(max_items={"image": 4, "video": 2}),
)

FAMILIES = (
    _QWEN3_VL,
    replace(
        _QWEN3_VL,
        family="qwen3-vl-moe",
        config=_qwen3_vl_moe,
        shapes=weights.of_class("Qwen3VLMoeForConditionalGeneration"),
        # The draw divides by all inputs of an expert and all its outputs.
        gains={**_GAINS, "*.experts.gate_up_proj": 20.0, "*.experts.down_proj": 20.0},
        published=_transposed_experts,
    ),
    replace(
        _QWEN3_VL,
        family="qwen3.5",
        config=_qwen3_5,
        shapes=weights.of_class("Qwen3_5ForConditionalGeneration"),
        gains={**_GAINS, "*.visual.*norm*.weight": 1.0, "*.linear_attn.norm.weight": 1.0, "*norm.weight": 0.0},
        serving=replace(_QWEN3_VL.serving, dtype="bfloat16"),
    ),
)
