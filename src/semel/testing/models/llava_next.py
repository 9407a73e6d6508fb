"""Tiny models of LLaVA-NeXT and LLaVA-OneVision: an image in tiles of the tower's size, and the whole of it.

OneVision takes videos too. The tensors have the names of the published checkpoints (`vision_tower.vision_model.`).
"""

from __future__ import annotations

from typing import Any

from semel.testing.models import weights
from semel.testing.models.declaration import Declaration, IdOf, prefixed
from semel.testing.models.templates import CHATML, chat_template
from semel.testing.models.text import NORM_EPSILON, text_config
from semel.testing.models.tiny_model import Serving

__all__ = ["FAMILIES"]

_MAX_POSITIONS = 32_768
_SIDE = 84
_PATCH_SIDE = 14
_GRID = [[height * _SIDE, width * _SIDE] for height, width in ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))]
_LARGE_GRID = [[height * _SIDE, width * _SIDE] for height in (1, 2, 3) for width in (1, 2, 3)]

_NAMED = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
_NEXT_TOKENS = (*_NAMED.values(), "<image>")
_NEXT_TEMPLATE = chat_template(
    {"image": "<image>\n"},
    start="bos_token",
    turn="message.role.upper() + ': '",
    end="(eos_token if message.role == 'assistant' else ' ')",
    answer="'ASSISTANT:'",
)
_ONEVISION_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")
_ONEVISION_TEMPLATE = chat_template({"image": "<image>\n", "video": "<video>\n"}, **CHATML)

_GAINS = {
    "*.patch_embedding.weight": 2.0,
    "*.position_embedding.weight": 3.0,
    "*.vision_tower.*.q_proj.weight": 1.5,
    "*.vision_tower.*.k_proj.weight": 1.5,
    "*.linear_1.weight": 2.0,
    "*.linear_2.weight": 2.0,
}
_published = prefixed(
    {
        "model.vision_tower.": "vision_tower.vision_model.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "model.image_newline": "image_newline",
        "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
    }
)
_TOWER = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": _SIDE,
    "patch_size": _PATCH_SIDE,
    "dtype": "float32",
}


def _next(id_of: IdOf) -> Any:
    from transformers import LlavaNextConfig

    text = text_config(
        _MAX_POSITIONS, bos=id_of("<s>"), eos=id_of("</s>"), model_type="llama", rms_norm_eps=NORM_EPSILON
    )
    return LlavaNextConfig(
        architectures=["LlavaNextForConditionalGeneration"],
        dtype="float32",
        image_token_index=id_of("<image>"),
        image_seq_length=(_SIDE // _PATCH_SIDE) ** 2,
        image_grid_pinpoints=_GRID,
        text_config={**text, "pad_token_id": id_of("<pad>"), "tie_word_embeddings": False},
        vision_config={**_TOWER, "model_type": "clip_vision_model", "projection_dim": 64},
    )


def _onevision(id_of: IdOf) -> Any:
    from transformers import LlavaOnevisionConfig

    text = text_config(
        _MAX_POSITIONS,
        bos=id_of("<|endoftext|>"),
        eos=id_of("<|im_end|>"),
        model_type="qwen2",
        rms_norm_eps=NORM_EPSILON,
        tie_word_embeddings=False,
    )
    return LlavaOnevisionConfig(
        architectures=["LlavaOnevisionForConditionalGeneration"],
        dtype="float32",
        image_token_index=id_of("<image>"),
        video_token_index=id_of("<video>"),
        image_grid_pinpoints=_LARGE_GRID,
        vision_feature_layer=-1,
        vision_aspect_ratio="anyres_max_9",
        text_config=text,
        vision_config={**_TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
    )


def _next_processor(tokenizer: Any) -> Any:
    from transformers import LlavaNextImageProcessor, LlavaNextProcessor

    images = LlavaNextImageProcessor(
        size={"shortest_edge": _SIDE}, crop_size={"height": _SIDE, "width": _SIDE}, image_grid_pinpoints=_GRID
    )
    return LlavaNextProcessor(
        images,
        tokenizer,
        patch_size=_PATCH_SIDE,
        vision_feature_select_strategy="default",
        chat_template=_NEXT_TEMPLATE,
        num_additional_image_tokens=1,
    )


def _onevision_processor(tokenizer: Any) -> Any:
    from transformers import LlavaOnevisionImageProcessor, LlavaOnevisionProcessor, LlavaOnevisionVideoProcessor

    size = {"height": _SIDE, "width": _SIDE}
    return LlavaOnevisionProcessor(
        LlavaOnevisionImageProcessor(size=dict(size), image_grid_pinpoints=_LARGE_GRID),
        tokenizer,
        LlavaOnevisionVideoProcessor(size=dict(size)),
        num_image_tokens=(_SIDE // _PATCH_SIDE) ** 2,
        vision_feature_select_strategy="full",
        chat_template=_ONEVISION_TEMPLATE,
        vision_aspect_ratio="anyres_max_9",
    )


FAMILIES = (
    Declaration(
        family="llava-next",
        config=_next,
        shapes=weights.of_class("LlavaNextForConditionalGeneration"),
        processor=_next_processor,
        special_tokens=_NEXT_TOKENS,
        named_tokens=_NAMED,
        end="</s>",
        pad="<pad>",
        chat_template=_NEXT_TEMPLATE,
        gains=_GAINS,
        published=_published,
        serving=Serving(max_items={"image": 4}),
    ),
    Declaration(
        family="llava-onevision",
        config=_onevision,
        shapes=weights.of_class("LlavaOnevisionForConditionalGeneration"),
        processor=_onevision_processor,
        special_tokens=_ONEVISION_TOKENS,
        end="<|im_end|>",
        pad="<|endoftext|>",
        chat_template=_ONEVISION_TEMPLATE,
        gains=_GAINS,
        published=_published,
        serving=Serving(max_items={"image": 4, "video": 2}),
    ),
)
