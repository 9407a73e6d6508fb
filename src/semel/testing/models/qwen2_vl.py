"""A tiny Qwen2-VL: images and videos, M-RoPE, one `<|image_pad|>` per four patches.

The tensors have the names of the published checkpoints (`visual.`, `model.`, `lm_head.`), which both transformers and
vLLM map to their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semel.testing.models import weights
from semel.testing.models.folder import write_folder
from semel.testing.models.text import END_GAIN, GAINS, HIDDEN_SIZE, NORM_EPSILON, VOCABULARY_TOKENS, text_config
from semel.testing.models.tokenizer import qwen2, train

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, ProcessorMixin, Qwen2Tokenizer

__all__ = ["Variant", "write", "write_variant"]

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

_GAINS = {
    "*.patch_embed.proj.weight": 2.0,
    "*.attn.qkv.weight": 1.5,
    "*.merger.mlp.0.weight": 2.0,
    "*.merger.mlp.2.weight": 2.0,
    **GAINS,
}

_PUBLISHED_PREFIXES = {"model.visual.": "visual.", "model.language_model.": "model.", "lm_head.": "lm_head."}


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the families that share template, tokens, processors and text model: its classes and its tower."""

    family: str
    config: type[PreTrainedConfig]
    model: type[PreTrainedModel]
    processor: type[ProcessorMixin]
    vision: Mapping[str, Any]
    """Sizes of the tower besides those of all variants."""


def write(directory: Path) -> None:
    """Write the model folder into `directory`, which exists."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLProcessor

    tower = {"embed_dim": 64, "num_heads": 4, "hidden_size": HIDDEN_SIZE}
    variant = Variant("qwen2-vl", Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLProcessor, tower)
    write_variant(variant, directory)


def write_variant(variant: Variant, directory: Path) -> None:
    """Write the model folder of `variant` into `directory`, which exists."""
    from transformers import GenerationConfig

    vocabulary = train(VOCABULARY_TOKENS - len(_SPECIAL_TOKENS))
    tokenizer = qwen2(vocabulary, _SPECIAL_TOKENS, _MAX_POSITIONS)
    tokenizer.chat_template = _CHAT_TEMPLATE
    config = _config(variant, tokenizer)
    end, pad = config.text_config.eos_token_id, config.text_config.bos_token_id
    tensors = weights.make(
        variant.family,
        variant.model,
        config,
        _GAINS,
        spoken=vocabulary.spoken(),
        end=end,
        end_gain=END_GAIN,
    )
    generation = GenerationConfig(eos_token_id=[end, pad], pad_token_id=pad)
    write_folder(
        directory,
        config=config,
        generation=generation,
        processor=_processor(variant, tokenizer),
        tensors=weights.rename(tensors, _PUBLISHED_PREFIXES),
    )


def _config(variant: Variant, tokenizer: Qwen2Tokenizer) -> Any:
    id_of = tokenizer.convert_tokens_to_ids
    return variant.config(
        architectures=[variant.model.__name__],
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
            **variant.vision,
        },
    )


def _processor(variant: Variant, tokenizer: Qwen2Tokenizer) -> Any:
    from transformers import Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 2_700}
    images, videos = Qwen2VLImageProcessor(size=dict(size)), Qwen2VLVideoProcessor(size=dict(size))
    return variant.processor(images, tokenizer, videos, chat_template=_CHAT_TEMPLATE)
