"""A tiny Command A Vision: an image in tiles, a line break after each; the head is the embedding."""

from __future__ import annotations

from typing import Any

from semel.lab.testing.models import weights
from semel.lab.testing.models.declaration import Declaration, IdOf, Serving, prefixed
from semel.lab.testing.models.text import chat_template, text_config

__all__ = ["FAMILIES"]

_MAX_POSITIONS = 32_768
_TILE_SIDE = 112
_PATCH_SIDE = 14
_DOWNSAMPLE = 2
_NAMED = {
    "unk_token": "<UNK>",
    "bos_token": "<BOS_TOKEN>",
    "eos_token": "<|END_OF_TURN_TOKEN|>",
    "pad_token": "<PAD>",
    "boi_token": "<|START_OF_IMG|>",
    "eoi_token": "<|END_OF_IMG|>",
    "image_token": "<|IMG_PATCH|>",
    "img_line_break_token": "<|IMG_LINE_BREAK|>",
}
_ROLES = {
    "system": "<|SYSTEM_TOKEN|>",
    "user": "<|USER_TOKEN|>",
    "assistant": "<|CHATBOT_TOKEN|>",
}
_SPECIAL_TOKENS = (*_NAMED.values(), "<|START_OF_TURN_TOKEN|>", *_ROLES.values())
_CHAT_TEMPLATE = chat_template(
    {"image": "<|IMG_PATCH|>"},
    start="bos_token",
    turn=f"'<|START_OF_TURN_TOKEN|>' + {_ROLES!r}[message.role]",
    end="eos_token",
    answer="'<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>'",
)


def _config(id_of: IdOf) -> Any:
    from transformers import Cohere2VisionConfig

    return Cohere2VisionConfig(
        architectures=["Cohere2VisionForConditionalGeneration"],
        dtype="float32",
        image_token_id=id_of("<|IMG_PATCH|>"),
        downsample_factor=_DOWNSAMPLE,
        alignment_intermediate_size=256,
        text_config=text_config(
            _MAX_POSITIONS,
            bos=id_of("<BOS_TOKEN>"),
            eos=id_of("<|END_OF_TURN_TOKEN|>"),
            pad_token_id=id_of("<PAD>"),
            model_type="cohere2",
            logit_scale=1.0,
            sliding_window=512,
            layer_types=["sliding_attention", "full_attention"],
        ),
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": _TILE_SIDE,
            "patch_size": _PATCH_SIDE,
            "vision_use_head": False,
            "dtype": "float32",
        },
    )


def _processor(tokenizer: Any) -> Any:
    from transformers import Cohere2VisionImageProcessor, Cohere2VisionProcessor

    images = Cohere2VisionImageProcessor(
        size={"height": _TILE_SIDE, "width": _TILE_SIDE},
        max_patches=6,
        patch_size=_TILE_SIDE // _PATCH_SIDE // _DOWNSAMPLE,  # the side of a tile in tokens
    )
    return Cohere2VisionProcessor(images, tokenizer, chat_template=_CHAT_TEMPLATE)


FAMILIES = (
    Declaration(
        family="cohere2-vision",
        config=_config,
        shapes=weights.of_class("Cohere2VisionForConditionalGeneration"),
        processor=_processor,
        special_tokens=_SPECIAL_TOKENS,
        named_tokens=_NAMED,
        end="<|END_OF_TURN_TOKEN|>",
        pad="<PAD>",
        chat_template=_CHAT_TEMPLATE,
        gains={
            "*.patch_embedding.weight": 2.0,
            "*.position_embedding.weight": 3.0,
            "*.vision_tower.*.q_proj.weight": 1.5,
            "*.vision_tower.*.k_proj.weight": 1.5,
            "*.linear_1.weight": 2.0,
            "*.linear_2.weight": 2.0,
            "*.language_model.norm.weight": 30.0,
            "*.embed_tokens.weight": 0.01,
        },
        head="model.language_model.embed_tokens.weight",
        tied="lm_head.weight",
        published=prefixed({"model.vision_tower.": "model.vision_tower.vision_model.", "model.": "model."}),
        serving=Serving(max_items={"image": 4}),
    ),
)
