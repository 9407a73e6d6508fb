"""Tiny models of Qwen's Omni thinkers: images, videos and clips in one prompt.

The talker is left out: vLLM serves the thinker only, and reads its tensors under `thinker.`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from semel.lab.testing.models import weights
from semel.lab.testing.models.declaration import Declaration, IdOf, Serving, prefixed
from semel.lab.testing.models.text import CHATML, HIDDEN_SIZE, NORM_EPSILON, chat_template, text_config

if TYPE_CHECKING:
    from semel.lab.testing.models.weights import Tensors

__all__ = ["FAMILIES"]

_MAX_POSITIONS = 32_768
_MEL_BINS = 128
_NAMED = {
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
_CHAT_TEMPLATE = chat_template(
    {
        "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
        "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
        "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
    },
    **CHATML,
)
_QWEN3_NAMED = {
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
_QWEN3_TEMPLATE = chat_template(
    {
        "image": "<|vision_start|><|image_pad|><|vision_end|>",
        "video": "<|vision_start|><|video_pad|><|vision_end|>",
        "audio": "<|audio_start|><|audio_pad|><|audio_end|>",
    },
    **CHATML,
)
_GAINS = {
    "*.conv1.weight": 5.0,
    "*.conv2.weight": 4.0,
    "*.audio_tower.*.q_proj.weight": 1.5,
    "*.audio_tower.*.k_proj.weight": 1.5,
    "*.audio_tower.proj.weight": 2.5,
    "audio_tower.proj.weight": 2.5,
    "*.fc1.weight": 1.5,
    "*.fc2.weight": 1.5,
    "*.out_proj.weight": 0.7,
    "*.patch_embed.proj.weight": 2.0,
    "*.attn.q.weight": 1.5,
    "*.attn.k.weight": 1.5,
    "*.merger.mlp.0.weight": 2.0,
    "*.merger.mlp.2.weight": 2.0,
}


def _qwen2_5_omni(id_of: IdOf) -> Any:
    from transformers import Qwen2_5OmniConfig

    return Qwen2_5OmniConfig(
        architectures=["Qwen2_5OmniModel"],
        dtype="float32",
        enable_audio_output=False,
        thinker_config={
            "dtype": "float32",
            "tie_word_embeddings": False,
            "audio_token_index": id_of("<|AUDIO|>"),
            "image_token_index": id_of("<|IMAGE|>"),
            "video_token_index": id_of("<|VIDEO|>"),
            "audio_start_token_id": id_of("<|audio_bos|>"),
            "audio_end_token_id": id_of("<|audio_eos|>"),
            "vision_start_token_id": id_of("<|vision_bos|>"),
            "vision_end_token_id": id_of("<|vision_eos|>"),
            "text_config": text_config(
                _MAX_POSITIONS,
                bos=id_of("<|endoftext|>"),
                eos=id_of("<|im_end|>"),
                rms_norm_eps=NORM_EPSILON,
                tie_word_embeddings=False,
                rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
            ),
            "vision_config": {
                "depth": 2,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_heads": 2,
                "out_hidden_size": HIDDEN_SIZE,
                "window_size": 56,
                "fullatt_block_indexes": [1],
                "tokens_per_second": 2,
                "dtype": "float32",
            },
            "audio_config": {
                "num_mel_bins": _MEL_BINS,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 128,
                "d_model": 64,
                "output_dim": HIDDEN_SIZE,
                "dtype": "float32",
            },
        },
    )


def _thinker(config: Any) -> weights.Shapes:
    return weights.of_class("Qwen2_5OmniThinkerForConditionalGeneration")(config.thinker_config)


def _processor(tokenizer: Any) -> Any:
    from transformers import (
        Qwen2_5OmniProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
        WhisperFeatureExtractor,
    )

    size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1_024}
    return Qwen2_5OmniProcessor(
        Qwen2VLImageProcessor(size=dict(size)),
        Qwen2VLVideoProcessor(size=dict(size)),
        WhisperFeatureExtractor(feature_size=_MEL_BINS, return_attention_mask=True, chunk_length=300),
        tokenizer,
        chat_template=_CHAT_TEMPLATE,
    )


def _qwen3_omni(id_of: IdOf) -> Any:
    from transformers import Qwen3OmniMoeConfig

    return Qwen3OmniMoeConfig(
        architectures=["Qwen3OmniMoeForConditionalGeneration"],
        dtype="float32",
        enable_audio_output=False,
        thinker_config={
            "dtype": "float32",
            "tie_word_embeddings": False,
            "audio_token_id": id_of("<|audio_pad|>"),
            "image_token_id": id_of("<|image_pad|>"),
            "video_token_id": id_of("<|video_pad|>"),
            "audio_start_token_id": id_of("<|audio_start|>"),
            "audio_end_token_id": id_of("<|audio_end|>"),
            "vision_start_token_id": id_of("<|vision_start|>"),
            "vision_end_token_id": id_of("<|vision_end|>"),
            "text_config": text_config(
                _MAX_POSITIONS,
                bos=id_of("<|endoftext|>"),
                eos=id_of("<|im_end|>"),
                head_dim=64,
                rms_norm_eps=NORM_EPSILON,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=96,
                tie_word_embeddings=False,
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 1e6,
                    "mrope_section": [12, 10, 10],
                    "mrope_interleaved": True,
                },
            ),
            "vision_config": {
                "depth": 3,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_heads": 2,
                "num_position_embeddings": 16**2,
                "image_size": 256,
                "out_hidden_size": HIDDEN_SIZE,
                "deepstack_visual_indexes": [0, 1],
                "apply_vit_abs_pos_embed": True,  # vLLM reads it, the class does not have it
                "dtype": "float32",
            },
            "audio_config": {
                "num_mel_bins": _MEL_BINS,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 128,
                "d_model": 64,
                "downsample_hidden_size": 32,
                "output_dim": HIDDEN_SIZE,
                "dtype": "float32",
            },
        },
    )


def _qwen3_processor(tokenizer: Any) -> Any:
    from transformers import (
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
        Qwen3OmniMoeProcessor,
        WhisperFeatureExtractor,
    )

    half, size = [0.5, 0.5, 0.5], {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 1_024}
    looks = {"patch_size": 16, "image_mean": half, "image_std": half}
    return Qwen3OmniMoeProcessor(
        Qwen2VLImageProcessor(size=dict(size), **looks),
        Qwen2VLVideoProcessor(size=dict(size), **looks),
        WhisperFeatureExtractor(feature_size=_MEL_BINS, return_attention_mask=True),
        tokenizer,
        chat_template=tokenizer.chat_template,
    )


def _published_experts(tensors: Tensors) -> Tensors:
    """Rename as published: three matrices for each expert, and all names begin with the thinker."""
    published: Tensors = {}
    for name, tensor in tensors.items():
        base, is_expert, matrix = name.rpartition(".experts.")
        for index, matrices in enumerate(tensor if is_expert else ()):
            parts = {"down_proj": matrices}
            if matrix == "gate_up_proj":
                half = len(matrices) // 2
                parts = {"gate_proj": matrices[:half], "up_proj": matrices[half:]}
            for part, values in parts.items():
                published[f"thinker.{base}.experts.{index}.{part}.weight"] = values.copy()
        if not is_expert:
            published[f"thinker.{name}"] = tensor
    return published


FAMILIES = (
    Declaration(
        family="qwen2.5-omni",
        config=_qwen2_5_omni,
        shapes=_thinker,
        processor=_processor,
        special_tokens=(*_NAMED.values(), "<|im_start|>"),
        named_tokens=_NAMED,
        end="<|im_end|>",
        pad="<|endoftext|>",
        chat_template=_CHAT_TEMPLATE,
        gains=_GAINS,
        published=prefixed({"": "thinker."}),
        serving=Serving(max_items={"image": 4, "audio": 3, "video": 2}),
    ),
    Declaration(
        family="qwen3-omni",
        config=_qwen3_omni,
        shapes=lambda config: weights.of_class("Qwen3OmniMoeThinkerForConditionalGeneration")(config.thinker_config),
        processor=_qwen3_processor,
        special_tokens=(*_QWEN3_NAMED.values(), "<|im_start|>"),
        named_tokens=_QWEN3_NAMED,
        end="<|im_end|>",
        pad="<|endoftext|>",
        chat_template=_QWEN3_TEMPLATE,
        gains={
            **_GAINS,
            "*.conv2d1.weight": 3.0,
            "*.conv2d2.weight": 3.0,
            "*.conv2d3.weight": 3.0,
            "*audio_tower.conv_out.weight": 2.0,
            "*audio_tower.proj*.weight": 2.0,
            "*.pos_embed.weight": 8.0,
            "*.attn.qkv.weight": 1.5,
            # The draw divides by all inputs of an expert and all its outputs.
            "*.experts.gate_up_proj": 20.0,
            "*.experts.down_proj": 20.0,
        },
        published=_published_experts,
        serving=Serving(max_items={"image": 4, "audio": 3, "video": 2}),
    ),
)
