"""Tiny models with a Pixtral tower: images of their own size, a mark at the end of each row of patches.

Mistral3 merges four patches into one token; Pixtral in Hugging Face's format is a LLaVA with that tower and no merging.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from semel.lab.testing.models import weights
from semel.lab.testing.models.declaration import Declaration, IdOf, Serving, prefixed
from semel.lab.testing.models.text import NORM_EPSILON, chat_template, text_config

__all__ = ["FAMILIES"]

_MAX_POSITIONS = 32_768
_IMAGE_SIDE = 224
_PATCH_SIDE = 14
_NAMED = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
_SPECIAL_TOKENS = (*_NAMED.values(), "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
_CHAT_TEMPLATE = chat_template(
    {"image": "[IMG]"},
    start="bos_token",
    turn="('' if message.role == 'assistant' else '[INST]')",
    end="(eos_token if message.role == 'assistant' else '[/INST]')",
    answer="''",
)
_GAINS = {
    "*.patch_conv.weight": 2.0,
    "*.vision_tower.*.q_proj.weight": 1.5,
    "*.vision_tower.*.k_proj.weight": 1.5,
    "*.merging_layer.weight": 2.0,
    "*.linear_1.weight": 2.0,
    "*.linear_2.weight": 2.0,
}
_published = prefixed(
    {
        "model.vision_tower.": "vision_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
    }
)


def _values(id_of: IdOf) -> dict[str, Any]:
    return {
        "dtype": "float32",
        "tie_word_embeddings": False,
        "image_token_index": id_of("[IMG]"),
        "vision_feature_layer": -1,
        "text_config": text_config(
            _MAX_POSITIONS,
            bos=id_of("<s>"),
            eos=id_of("</s>"),
            model_type="mistral",
            head_dim=64,
            rms_norm_eps=NORM_EPSILON,
            tie_word_embeddings=False,
            sliding_window=None,
        ),
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": _IMAGE_SIDE,
            "patch_size": _PATCH_SIDE,
            "dtype": "float32",
        },
    }


def _mistral3(id_of: IdOf) -> Any:
    from transformers import Mistral3Config

    return Mistral3Config(architectures=["Mistral3ForConditionalGeneration"], spatial_merge_size=2, **_values(id_of))


def _pixtral(id_of: IdOf) -> Any:
    from transformers import LlavaConfig

    return LlavaConfig(
        architectures=["LlavaForConditionalGeneration"],
        image_seq_length=1,
        vision_feature_select_strategy="full",
        **_values(id_of),
    )


def _processor(tokenizer: Any, merge: int) -> Any:
    from transformers import PixtralImageProcessor, PixtralProcessor

    side = _PATCH_SIDE * merge
    images = PixtralImageProcessor(size={"longest_edge": _IMAGE_SIDE}, patch_size={"height": side, "width": side})
    return PixtralProcessor(
        images, tokenizer, patch_size=_PATCH_SIDE, spatial_merge_size=merge, chat_template=_CHAT_TEMPLATE
    )


_MISTRAL3 = Declaration(
    family="mistral3",
    config=_mistral3,
    shapes=weights.of_class("Mistral3ForConditionalGeneration"),
    processor=lambda tokenizer: _processor(tokenizer, 2),
    special_tokens=_SPECIAL_TOKENS,
    named_tokens=_NAMED,
    end="</s>",
    pad="<pad>",
    chat_template=_CHAT_TEMPLATE,
    gains=_GAINS,
    published=_published,
    serving=Serving(max_items={"image": 4}),
)

FAMILIES = (
    _MISTRAL3,
    replace(
        _MISTRAL3,
        family="pixtral",
        config=_pixtral,
        shapes=weights.of_class("LlavaForConditionalGeneration"),
        processor=lambda tokenizer: _processor(tokenizer, 1),
    ),
)
