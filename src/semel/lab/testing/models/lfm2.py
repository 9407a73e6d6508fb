"""A tiny LFM2-VL: a hybrid of short convolutions and attention; small images whole, large ones in tiles."""

from __future__ import annotations

from typing import Any

from semel.lab.testing.models import weights
from semel.lab.testing.models.declaration import Declaration, IdOf, Serving, prefixed
from semel.lab.testing.models.text import CHATML, HIDDEN_SIZE, chat_template, text_config

__all__ = ["FAMILIES"]

_MAX_POSITIONS = 32_768
_NAMED = {
    "bos_token": "<|startoftext|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|pad|>",
    "image_token": "<image>",
    "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>",
    "image_thumbnail_token": "<|img_thumbnail|>",
}
_SPECIAL_TOKENS = (
    *_NAMED.values(),
    "<|im_start|>",
    *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)),
)
_CHAT_TEMPLATE = chat_template({"image": "<image>"}, start="bos_token", **CHATML)


def _config(id_of: IdOf) -> Any:
    from transformers import Lfm2VlConfig

    return Lfm2VlConfig(
        architectures=["Lfm2VlForConditionalGeneration"],
        dtype="float32",
        tie_word_embeddings=True,
        image_token_id=id_of("<image>"),
        projector_hidden_size=256,
        text_config=text_config(
            _MAX_POSITIONS,
            bos=id_of("<|startoftext|>"),
            eos=id_of("<|im_end|>"),
            pad_token_id=id_of("<|pad|>"),
            model_type="lfm2",
            layer_types=["conv", "full_attention"],
            block_auto_adjust_ff_dim=False,
            # vLLM reads these two; the class of the configuration has no such values.
            block_dim=HIDDEN_SIZE,
            conv_dim=HIDDEN_SIZE,
        ),
        vision_config={
            "model_type": "siglip2_vision_model",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_patches": 256,
            "patch_size": 16,
            "vision_use_head": False,
            "dtype": "float32",
        },
    )


def _processor(tokenizer: Any) -> Any:
    from transformers import Lfm2VlImageProcessor, Lfm2VlProcessor

    images = Lfm2VlImageProcessor(min_image_tokens=16, max_image_tokens=64, tile_size=256, max_tiles=4)
    return Lfm2VlProcessor(images, tokenizer, chat_template=_CHAT_TEMPLATE)


FAMILIES = (
    Declaration(
        family="lfm2-vl",
        config=_config,
        shapes=weights.of_class("Lfm2VlForConditionalGeneration"),
        processor=_processor,
        special_tokens=_SPECIAL_TOKENS,
        named_tokens=_NAMED,
        end="<|im_end|>",
        pad="<|pad|>",
        chat_template=_CHAT_TEMPLATE,
        gains={
            "*.patch_embedding.weight": 2.0,
            "*.position_embedding.weight": 8.0,
            "*.vision_tower.*.q_proj.weight": 1.5,
            "*.vision_tower.*.k_proj.weight": 1.5,
            "*.linear_1.weight": 2.0,
            "*.linear_2.weight": 2.0,
            "*.conv.out_proj.weight": 0.5,
            "*.self_attn.out_proj.weight": 4.0,
            "*.q_layernorm.weight": 2.0,
            "*.k_layernorm.weight": 2.0,
            "*.language_model.embedding_norm.weight": 30.0,
            "*.embed_tokens.weight": 0.01,
        },
        head="model.language_model.embed_tokens.weight",
        tied="lm_head.weight",
        published=prefixed({"model.vision_tower.": "model.vision_tower.vision_model.", "model.": "model."}),
        serving=Serving(max_items={"image": 4}),
    ),
)
