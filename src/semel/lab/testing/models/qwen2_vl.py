"""Tiny models of Qwen2-VL and Qwen2.5-VL: images and videos, M-RoPE, one `<|image_pad|>` per four patches.

The tower of Qwen2.5-VL has window attention, and its positions depend on time. The tensors have the names of the
published checkpoints (`visual.`, `model.`, `lm_head.`), which both transformers and vLLM map to their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semel.lab.testing.models import weights
from semel.lab.testing.models.declaration import Declaration, IdOf, Serving, prefixed
from semel.lab.testing.models.text import HIDDEN_SIZE, NORM_EPSILON, text_config

__all__ = ["FAMILIES"]

_MAX_POSITIONS = 65_536

_SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

_CHAT_TEMPLATE = """\
{%- macro render(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- else -%}
    {%- for part in content -%}
      {%- if part.type in ('image', 'image_url') -%}
        {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
      {%- elif part.type in ('video', 'video_url') -%}
        {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
      {%- else -%}
        {{- part.text -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- if messages[0].role != 'system' -%}
  {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\\n' + render(message.content) + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def _family(family: str, name: str, tower: Mapping[str, Any]) -> Declaration:
    """One of the families that share template, tokens, processors and text model; `name` is that of its classes."""

    def config(id_of: IdOf) -> Any:
        import transformers

        return getattr(transformers, f"{name}Config")(
            architectures=[f"{name}ForConditionalGeneration"],
            dtype="float32",
            image_token_id=id_of("<|image_pad|>"),
            video_token_id=id_of("<|video_pad|>"),
            vision_start_token_id=id_of("<|vision_start|>"),
            vision_end_token_id=id_of("<|vision_end|>"),
            text_config=text_config(
                _MAX_POSITIONS,
                bos=id_of("<|endoftext|>"),
                eos=id_of("<|im_end|>"),
                rms_norm_eps=NORM_EPSILON,
                rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
            ),
            vision_config={
                "depth": 2,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "dtype": "float32",
                **tower,
            },
        )

    def processor(tokenizer: Any) -> Any:
        import transformers
        from transformers import Qwen2VLImageProcessor, Qwen2VLVideoProcessor

        size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 2_700}
        images, videos = Qwen2VLImageProcessor(size=dict(size)), Qwen2VLVideoProcessor(size=dict(size))
        return getattr(transformers, f"{name}Processor")(images, tokenizer, videos, chat_template=_CHAT_TEMPLATE)

    return Declaration(
        family=family,
        config=config,
        shapes=weights.of_class(f"{name}ForConditionalGeneration"),
        processor=processor,
        special_tokens=_SPECIAL_TOKENS,
        end="<|im_end|>",
        stops=("<|endoftext|>",),
        pad="<|endoftext|>",
        chat_template=_CHAT_TEMPLATE,
        gains={
            "*.patch_embed.proj.weight": 2.0,
            "*.attn.qkv.weight": 1.5,
            "*.merger.mlp.0.weight": 2.0,
            "*.merger.mlp.2.weight": 2.0,
        },
        published=prefixed({"model.visual.": "visual.", "model.language_model.": "model.", "lm_head.": "lm_head."}),
        max_positions=_MAX_POSITIONS,
        serving=Serving(max_items={"image": 4, "video": 2}),
    )


FAMILIES = (
    _family("qwen2-vl", "Qwen2VL", {"embed_dim": 64, "num_heads": 4, "hidden_size": HIDDEN_SIZE}),
    _family(
        "qwen2.5-vl",
        "Qwen2_5_VL",
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": HIDDEN_SIZE,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
    ),
)
