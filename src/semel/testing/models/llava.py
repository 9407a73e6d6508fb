"""A tiny LLaVA: images of one size through a CLIP tower, one `<image>` per patch.

The tensors carry the names of the published checkpoints (`vision_tower.vision_model.`, `language_model.model.`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from semel.testing.models import weights
from semel.testing.models.tokenizer import byte_level, train

if TYPE_CHECKING:
    from transformers import LlavaConfig, PreTrainedTokenizerFast

__all__ = ["write"]

_FAMILY = "llava"
_VOCABULARY_TOKENS = 1024
_HIDDEN_SIZE = 128
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
    "*.embed_tokens.weight": 0.3,
    "*.q_proj.weight": 2.2,
    "*.k_proj.weight": 2.2,
    "*.v_proj.weight": 2.0,
    "*.o_proj.weight": 2.0,
    "*.gate_proj.weight": 2.0,
    "*.up_proj.weight": 2.0,
    "*.down_proj.weight": 2.0,
    "lm_head.weight": 3.0,
}
_END_GAIN = 0.9
# Not negligible next to the variance of a token embedding: the first norm dampens text, so the louder items stand out.
_NORM_EPSILON = 0.1

_PUBLISHED_PREFIXES = {
    "model.vision_tower.": "vision_tower.vision_model.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
}


def write(directory: Path) -> None:
    """Write the model folder into `directory`, which exists."""
    from transformers import GenerationConfig

    vocabulary = train(_VOCABULARY_TOKENS - len(_SPECIAL_TOKENS))
    tokenizer = byte_level(vocabulary, _SPECIAL_TOKENS, _MAX_POSITIONS, named=_NAMED)
    config = _config(tokenizer)
    config.save_pretrained(directory)
    end, pad = tokenizer.convert_tokens_to_ids(["</s>", "<pad>"])
    GenerationConfig(eos_token_id=end, pad_token_id=pad).save_pretrained(directory)
    _write_processor(tokenizer, directory)
    _write_weights(config, vocabulary.spoken(), directory)


def _config(tokenizer: PreTrainedTokenizerFast) -> LlavaConfig:
    from transformers import LlavaConfig

    id_of = tokenizer.convert_tokens_to_ids
    return LlavaConfig(
        architectures=["LlavaForConditionalGeneration"],
        dtype="float32",
        image_token_index=id_of(_IMAGE),
        image_seq_length=(_IMAGE_SIDE // _PATCH_SIDE) ** 2,
        text_config={
            "model_type": "llama",
            "vocab_size": _VOCABULARY_TOKENS,
            "hidden_size": _HIDDEN_SIZE,
            "intermediate_size": 2 * _HIDDEN_SIZE,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": _MAX_POSITIONS,
            "rms_norm_eps": _NORM_EPSILON,
            "bos_token_id": id_of("<s>"),
            "eos_token_id": id_of("</s>"),
            "pad_token_id": id_of("<pad>"),
            "dtype": "float32",
        },
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


def _write_processor(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    from transformers import CLIPImageProcessor, LlavaProcessor

    images = CLIPImageProcessor(
        size={"shortest_edge": _IMAGE_SIDE}, crop_size={"height": _IMAGE_SIDE, "width": _IMAGE_SIDE}
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    LlavaProcessor(
        images,
        tokenizer,
        patch_size=_PATCH_SIDE,
        vision_feature_select_strategy="default",
        chat_template=_CHAT_TEMPLATE,
        image_token=_IMAGE,
        num_additional_image_tokens=1,
    ).save_pretrained(directory)
    images.save_pretrained(directory)


def _write_weights(config: LlavaConfig, spoken: list[int], directory: Path) -> None:
    from transformers import LlavaForConditionalGeneration

    shapes = weights.shapes(lambda: LlavaForConditionalGeneration(config))
    tensors = weights.draw(_FAMILY, shapes, _GAINS)
    weights.quieten(tensors["lm_head.weight"], spoken=spoken, end=config.text_config.eos_token_id, end_gain=_END_GAIN)
    weights.save(weights.rename(tensors, _PUBLISHED_PREFIXES), directory)
