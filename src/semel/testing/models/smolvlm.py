"""A tiny SmolVLM: Idefics3 with marks of its own; its processor needs the package num2words."""

from __future__ import annotations

from typing import Any

from semel.testing.models import weights
from semel.testing.models.declaration import Declaration, IdOf
from semel.testing.models.templates import chat_template
from semel.testing.models.text import NORM_EPSILON, text_config
from semel.testing.models.tiny_model import Serving

__all__ = ["FAMILIES"]

_MAX_POSITIONS = 32_768
_TILE_SIDE = 56
_PATCH_SIDE = 14
_SCALE = 2
_NAMED = {
    "bos_token": "<|im_start|>",
    "eos_token": "<end_of_utterance>",
    "pad_token": "<|pad|>",
    "fake_image_token": "<fake_token_around_image>",
    "image_token": "<image>",
    "global_image_token": "<global-img>",
}
_SPECIAL_TOKENS = (
    *_NAMED.values(),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
_CHAT_TEMPLATE = chat_template(
    {"image": "<image>"},
    start="bos_token",
    turn="message.role | capitalize + ': '",
    end="'<end_of_utterance>\\n'",
    answer="'Assistant:'",
)


def _config(id_of: IdOf) -> Any:
    from transformers import SmolVLMConfig

    return SmolVLMConfig(
        architectures=["SmolVLMForConditionalGeneration"],
        dtype="float32",
        image_token_id=id_of("<image>"),
        pad_token_id=id_of("<|pad|>"),
        scale_factor=_SCALE,
        tie_word_embeddings=False,
        text_config=text_config(
            _MAX_POSITIONS,
            bos=id_of("<|im_start|>"),
            eos=id_of("<end_of_utterance>"),
            model_type="llama",
            rms_norm_eps=NORM_EPSILON,
            pad_token_id=id_of("<|pad|>"),
            tie_word_embeddings=False,
        ),
        vision_config={
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": _TILE_SIDE,
            "patch_size": _PATCH_SIDE,
            "dtype": "float32",
        },
    )


def _processor(tokenizer: Any) -> Any:
    from transformers import SmolVLMImageProcessor, SmolVLMProcessor, SmolVLMVideoProcessor

    sizes = {"size": {"longest_edge": 4 * _TILE_SIDE}, "max_image_size": {"longest_edge": _TILE_SIDE}}
    return SmolVLMProcessor(
        SmolVLMImageProcessor(**sizes),
        tokenizer,
        SmolVLMVideoProcessor(**sizes),
        image_seq_len=(_TILE_SIDE // _PATCH_SIDE // _SCALE) ** 2,
        chat_template=_CHAT_TEMPLATE,
    )


FAMILIES = (
    Declaration(
        family="smolvlm",
        config=_config,
        shapes=weights.of_class("SmolVLMForConditionalGeneration"),
        processor=_processor,
        special_tokens=_SPECIAL_TOKENS,
        named_tokens=_NAMED,
        end="<end_of_utterance>",
        pad="<|pad|>",
        chat_template=_CHAT_TEMPLATE,
        gains={
            "*.patch_embedding.weight": 2.0,
            "*.position_embedding.weight": 3.0,
            "*.vision_model.*.q_proj.weight": 1.5,
            "*.vision_model.*.k_proj.weight": 1.5,
            "*.modality_projection.proj.weight": 2.0,
        },
        serving=Serving(max_items={"image": 4}),
    ),
)
