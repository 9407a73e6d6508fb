"""Tiny models of LLaVA, LLaVA-NeXT and LLaVA-OneVision: an image of the tower's size, or tiles and the whole of it.

OneVision takes videos too. The tensors have the names of the published checkpoints (`vision_tower.vision_model.`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from semel.lab.testing.models import weights
from semel.lab.testing.models.declaration import Declaration, IdOf, Serving, prefixed
from semel.lab.testing.models.text import CHATML, NORM_EPSILON, chat_template, text_config

__all__ = ["FAMILIES"]

_MAX_POSITIONS = 32_768
_SIDE = 84
_PATCH_SIDE = 14
_GRID = [[height * _SIDE, width * _SIDE] for height, width in ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))]
_LARGE_GRID = [[height * _SIDE, width * _SIDE] for height in (1, 2, 3) for width in (1, 2, 3)]

_NAMED = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
_SPECIAL_TOKENS = (*_NAMED.values(), "<image>")
_LLAVA_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
  {%- if message.role != 'system' -%}
    {{- message.role.upper() + ': ' -}}
  {%- endif -%}
  {%- if message.content is string -%}
    {{- message.content -}}
  {%- else -%}
    {%- for part in message.content if part.type in ('image', 'image_url') -%}
      {{- '<image>\\n' -}}
    {%- endfor -%}
    {%- for part in message.content if part.type == 'text' -%}
      {{- part.text -}}
    {%- endfor -%}
  {%- endif -%}
  {{- eos_token if message.role == 'assistant' else ' ' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- 'ASSISTANT:' -}}
{%- endif -%}
"""
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


def _clip_values(id_of: IdOf, name: str, **own_text: Any) -> dict[str, Any]:
    """Return the values of a configuration with a CLIP tower and a Llama; `name` is that of its classes."""
    return {
        "architectures": [f"{name}ForConditionalGeneration"],
        "dtype": "float32",
        "image_token_index": id_of("<image>"),
        "image_seq_length": (_SIDE // _PATCH_SIDE) ** 2,
        "text_config": text_config(
            _MAX_POSITIONS,
            bos=id_of("<s>"),
            eos=id_of("</s>"),
            model_type="llama",
            rms_norm_eps=NORM_EPSILON,
            pad_token_id=id_of("<pad>"),
            **own_text,
        ),
        "vision_config": {**_TOWER, "model_type": "clip_vision_model", "projection_dim": 64},
    }


def _llava(id_of: IdOf) -> Any:
    from transformers import LlavaConfig

    return LlavaConfig(**_clip_values(id_of, "Llava"))


def _next(id_of: IdOf) -> Any:
    from transformers import LlavaNextConfig

    values = _clip_values(id_of, "LlavaNext", tie_word_embeddings=False)
    return LlavaNextConfig(image_grid_pinpoints=_GRID, **values)


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


_CLIP_IMAGES = {"size": {"shortest_edge": _SIDE}, "crop_size": {"height": _SIDE, "width": _SIDE}}
_CLIP_TOKENS = {
    "patch_size": _PATCH_SIDE,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}


def _llava_processor(tokenizer: Any) -> Any:
    from transformers import CLIPImageProcessor, LlavaProcessor

    images = CLIPImageProcessor(**_CLIP_IMAGES)
    values = {"image_token": "<image>", **_CLIP_TOKENS}
    return LlavaProcessor(images, tokenizer, chat_template=_LLAVA_TEMPLATE, **values)


def _next_processor(tokenizer: Any) -> Any:
    from transformers import LlavaNextImageProcessor, LlavaNextProcessor

    images = LlavaNextImageProcessor(**_CLIP_IMAGES, image_grid_pinpoints=_GRID)
    return LlavaNextProcessor(images, tokenizer, chat_template=_NEXT_TEMPLATE, **_CLIP_TOKENS)


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


def _clip_family(
    family: str, name: str, config: Callable[[IdOf], Any], processor: Callable[[Any], Any], template: str
) -> Declaration:
    return Declaration(
        family=family,
        config=config,
        shapes=weights.of_class(f"{name}ForConditionalGeneration"),
        processor=processor,
        special_tokens=_SPECIAL_TOKENS,
        named_tokens=_NAMED,
        end="</s>",
        pad="<pad>",
        chat_template=template,
        gains=_GAINS,
        published=_published,
        serving=Serving(max_items={"image": 4}),
    )


FAMILIES = (
    _clip_family("llava", "Llava", _llava, _llava_processor, _LLAVA_TEMPLATE),
    _clip_family("llava-next", "LlavaNext", _next, _next_processor, _NEXT_TEMPLATE),
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
