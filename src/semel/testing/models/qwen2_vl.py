"""A tiny Qwen2-VL: images and videos, M-RoPE, one `<|image_pad|>` per four patches.

The tensors carry the names of the published checkpoints (`visual.`, `model.`, `lm_head.`), which both transformers and
vLLM map to their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from semel.testing.models import weights
from semel.testing.models.tokenizer import qwen2, train

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer, Qwen2VLConfig

__all__ = ["CHAT_TEMPLATE", "GAINS", "SPECIAL_TOKENS", "image_size", "write"]

_FAMILY = "qwen2-vl"
_VOCABULARY_TOKENS = 1024
_HIDDEN_SIZE = 128
_MAX_POSITIONS = 65_536

SPECIAL_TOKENS = (
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

CHAT_TEMPLATE = """\
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

GAINS = {
    "*.patch_embed.proj.weight": 2.0,
    "*.attn.qkv.weight": 1.5,
    "*.merger.mlp.0.weight": 2.0,
    "*.merger.mlp.2.weight": 2.0,
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

_PUBLISHED_PREFIXES = {"model.visual.": "visual.", "model.language_model.": "model.", "lm_head.": "lm_head."}


def image_size() -> dict[str, int]:
    """The fewest and the most pixels of an image, under the names of its processor."""
    return {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 2_700}


def write(directory: Path) -> None:
    """Write the model folder into `directory`, which exists."""
    from transformers import GenerationConfig

    vocabulary = train(_VOCABULARY_TOKENS - len(SPECIAL_TOKENS))
    tokenizer = qwen2(vocabulary, SPECIAL_TOKENS, _MAX_POSITIONS)
    config = _config(tokenizer)
    config.save_pretrained(directory)
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    GenerationConfig(eos_token_id=ends, pad_token_id=ends[1]).save_pretrained(directory)
    _write_processor(tokenizer, directory)
    _write_weights(config, vocabulary.spoken(), directory)


def _config(tokenizer: Qwen2Tokenizer) -> Qwen2VLConfig:
    from transformers import Qwen2VLConfig

    id_of = tokenizer.convert_tokens_to_ids
    return Qwen2VLConfig(
        architectures=["Qwen2VLForConditionalGeneration"],
        dtype="float32",
        image_token_id=id_of("<|image_pad|>"),
        video_token_id=id_of("<|video_pad|>"),
        vision_start_token_id=id_of("<|vision_start|>"),
        vision_end_token_id=id_of("<|vision_end|>"),
        text_config={
            "vocab_size": _VOCABULARY_TOKENS,
            "hidden_size": _HIDDEN_SIZE,
            "intermediate_size": 2 * _HIDDEN_SIZE,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": _MAX_POSITIONS,
            "rms_norm_eps": _NORM_EPSILON,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
            "bos_token_id": id_of("<|endoftext|>"),
            "eos_token_id": id_of("<|im_end|>"),
            "dtype": "float32",
        },
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "num_heads": 4,
            "hidden_size": _HIDDEN_SIZE,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "dtype": "float32",
        },
    )


def _write_processor(tokenizer: Qwen2Tokenizer, directory: Path) -> None:
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    images = Qwen2VLImageProcessor(size=image_size())
    videos = Qwen2VLVideoProcessor(size=image_size())
    tokenizer.chat_template = CHAT_TEMPLATE
    Qwen2VLProcessor(images, tokenizer, videos, chat_template=CHAT_TEMPLATE).save_pretrained(directory)
    images.save_pretrained(directory)


def _write_weights(config: Qwen2VLConfig, spoken: list[int], directory: Path) -> None:
    from transformers import Qwen2VLForConditionalGeneration

    shapes = weights.shapes(lambda: Qwen2VLForConditionalGeneration(config))
    tensors = weights.draw(_FAMILY, shapes, GAINS)
    weights.quieten(tensors["lm_head.weight"], spoken=spoken, end=config.text_config.eos_token_id, end_gain=_END_GAIN)
    weights.save(weights.rename(tensors, _PUBLISHED_PREFIXES), directory)
