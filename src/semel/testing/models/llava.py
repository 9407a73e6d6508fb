"""A tiny LLaVA: images of one size through a CLIP tower, one `<image>` per patch.

The tensors have the names of the published checkpoints (`vision_tower.vision_model.`, `language_model.model.`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from semel.testing.models import weights
from semel.testing.models.folder import write_folder
from semel.testing.models.text import END_GAIN, GAINS, NORM_EPSILON, VOCABULARY_TOKENS, text_config
from semel.testing.models.tokenizer import byte_level, train

if TYPE_CHECKING:
    from transformers import LlavaConfig, LlavaProcessor, PreTrainedTokenizerFast

__all__ = ["write"]

_FAMILY = "llava"
_MAX_POSITIONS = 32_768
_IMAGE_SIDE = 84
_PATCH_SIDE = 14
_IMAGE = "<image>"
_NAMED = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
_SPECIAL_TOKENS = (*_NAMED.values(), _IMAGE)

_CHAT_TEMPLATE = """\
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

_GAINS = {
    "*.patch_embedding.weight": 2.0,
    "*.position_embedding.weight": 3.0,
    "*.vision_tower.*.q_proj.weight": 1.5,
    "*.vision_tower.*.k_proj.weight": 1.5,
    "*.linear_1.weight": 2.0,
    "*.linear_2.weight": 2.0,
    **GAINS,
}

_PUBLISHED_PREFIXES = {
    "model.vision_tower.": "vision_tower.vision_model.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
}


def write(directory: Path) -> None:
    """Write the model folder into `directory`, which exists."""
    from transformers import GenerationConfig, LlavaForConditionalGeneration

    vocabulary = train(VOCABULARY_TOKENS - len(_SPECIAL_TOKENS))
    tokenizer = byte_level(vocabulary, _SPECIAL_TOKENS, _MAX_POSITIONS, named=_NAMED)
    tokenizer.chat_template = _CHAT_TEMPLATE
    config = _config(tokenizer)
    text = config.text_config
    tensors = weights.make(
        _FAMILY,
        LlavaForConditionalGeneration,
        config,
        _GAINS,
        spoken=vocabulary.spoken(),
        end=text.eos_token_id,
        end_gain=END_GAIN,
    )
    generation = GenerationConfig(eos_token_id=text.eos_token_id, pad_token_id=text.pad_token_id)
    write_folder(
        directory,
        config=config,
        generation=generation,
        processor=_processor(tokenizer),
        tensors=weights.rename(tensors, _PUBLISHED_PREFIXES),
    )


def _config(tokenizer: PreTrainedTokenizerFast) -> LlavaConfig:
    from transformers import LlavaConfig

    id_of = tokenizer.convert_tokens_to_ids
    return LlavaConfig(
        architectures=["LlavaForConditionalGeneration"],
        dtype="float32",
        image_token_index=id_of(_IMAGE),
        image_seq_length=(_IMAGE_SIDE // _PATCH_SIDE) ** 2,
        text_config=text_config(
            _MAX_POSITIONS,
            bos=id_of("<s>"),
            eos=id_of("</s>"),
            model_type="llama",
            rms_norm_eps=NORM_EPSILON,
            pad_token_id=id_of("<pad>"),
        ),
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": _IMAGE_SIDE,
            "patch_size": _PATCH_SIDE,
            "projection_dim": 64,
            "dtype": "float32",
        },
    )


def _processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    from transformers import CLIPImageProcessor, LlavaProcessor

    images = CLIPImageProcessor(
        size={"shortest_edge": _IMAGE_SIDE}, crop_size={"height": _IMAGE_SIDE, "width": _IMAGE_SIDE}
    )
    return LlavaProcessor(
        images,
        tokenizer,
        patch_size=_PATCH_SIDE,
        vision_feature_select_strategy="default",
        chat_template=_CHAT_TEMPLATE,
        image_token=_IMAGE,
        num_additional_image_tokens=1,
    )
