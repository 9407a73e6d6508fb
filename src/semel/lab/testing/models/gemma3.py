"""A tiny Gemma 3: images of one size through a SigLIP tower, each a fixed number of `<image_soft_token>` between marks.

An image takes a start mark, its embeddings and an end mark, so its placeholder has a mask. Blank lines surround it:
runs of newlines are tokens of the vocabulary, as in the published tokenizers. The tensors have the names of the
published checkpoints (`vision_tower.vision_model.`, `language_model.model.`); the head is the embedding.
"""

from __future__ import annotations

from typing import Any

from semel.lab.testing.models import weights
from semel.lab.testing.models.declaration import Declaration, IdOf, Serving, prefixed
from semel.lab.testing.models.text import text_config

__all__ = ["FAMILIES"]

_MAX_POSITIONS = 32_768
_IMAGE_SIDE = 112
_PATCH_SIDE = 14
_IMAGE_TOKENS = 16
_NAMED = {
    "pad_token": "<pad>",
    "eos_token": "<eos>",
    "bos_token": "<bos>",
    "unk_token": "<unk>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
_SPECIAL_TOKENS = (*_NAMED.values(), "<start_of_turn>", "<end_of_turn>")
_NEWLINES = tuple("\n" * count for count in range(1, 32))

_CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- set turns = messages -%}
{%- set opening = '' -%}
{%- if messages[0].role == 'system' -%}
  {%- set content = messages[0].content -%}
  {%- set opening = (content if content is string else content[0].text) + '\\n\\n' -%}
  {%- set turns = messages[1:] -%}
{%- endif -%}
{%- for message in turns -%}
  {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}
  {{- opening if loop.first else '' -}}
  {%- if message.content is string -%}
    {{- message.content | trim -}}
  {%- else -%}
    {%- for part in message.content -%}
      {%- if part.type in ('image', 'image_url') -%}
        {{- '<start_of_image>' -}}
      {%- else -%}
        {{- part.text | trim -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{- '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<start_of_turn>model\\n' -}}
{%- endif -%}
"""


def _config(id_of: IdOf) -> Any:
    from transformers import Gemma3Config

    return Gemma3Config(
        architectures=["Gemma3ForConditionalGeneration"],
        dtype="float32",
        boi_token_index=id_of("<start_of_image>"),
        eoi_token_index=id_of("<end_of_image>"),
        image_token_index=id_of("<image_soft_token>"),
        mm_tokens_per_image=_IMAGE_TOKENS,
        eos_token_id=[id_of("<eos>"), id_of("<end_of_turn>")],
        text_config=text_config(
            _MAX_POSITIONS,
            bos=id_of("<bos>"),
            eos=id_of("<eos>"),
            head_dim=64,
            query_pre_attn_scalar=16,
            sliding_window=512,
            layer_types=["sliding_attention", "full_attention"],
            pad_token_id=id_of("<pad>"),
        ),
        vision_config={
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": _IMAGE_SIDE,
            "patch_size": _PATCH_SIDE,
            "vision_use_head": False,
            "dtype": "float32",
        },
    )


def _processor(tokenizer: Any) -> Any:
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    images = Gemma3ImageProcessor(
        size={"height": _IMAGE_SIDE, "width": _IMAGE_SIDE}, image_mean=[0.5, 0.5, 0.5], image_std=[0.5, 0.5, 0.5]
    )
    return Gemma3Processor(images, tokenizer, chat_template=_CHAT_TEMPLATE, image_seq_length=_IMAGE_TOKENS)


FAMILIES = (
    Declaration(
        family="gemma3",
        config=_config,
        shapes=weights.of_class("Gemma3ForConditionalGeneration"),
        processor=_processor,
        special_tokens=_SPECIAL_TOKENS,
        plain_tokens=_NEWLINES,
        named_tokens=_NAMED,
        end="<eos>",
        stops=("<end_of_turn>",),
        pad="<pad>",
        chat_template=_CHAT_TEMPLATE,
        gains={
            "*.vision_tower.*norm*.weight": 1.0,
            "*.post_*_layernorm.weight": 4.0,
            "*.language_model.norm.weight": 30.0,
            "*norm.weight": 0.0,  # Gemma adds 1 to the scale of a norm
            "*.patch_embedding.weight": 2.0,
            "*.position_embedding.weight": 3.0,
            "*.vision_tower.*.q_proj.weight": 1.5,
            "*.vision_tower.*.k_proj.weight": 1.5,
            "*.mm_input_projection_weight": 2.0,
            "*.embed_tokens.weight": 0.01,
            "*.q_proj.weight": 1.0,
            "*.k_proj.weight": 1.0,
        },
        end_gain=0.7,
        head="model.language_model.embed_tokens.weight",
        tied="lm_head.weight",
        published=prefixed(
            {
                "model.vision_tower.": "vision_tower.vision_model.",
                "model.multi_modal_projector.": "multi_modal_projector.",
                "model.language_model.": "language_model.model.",
            }
        ),
        serving=Serving(max_items={"image": 4}),
    ),
)
