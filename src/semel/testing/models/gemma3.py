"""A tiny Gemma 3: images of one size through a SigLIP tower, each a fixed number of `<image_soft_token>` between marks.

An image takes a start mark, its embeddings and an end mark, so its placeholder has a mask. Blank lines surround it:
runs of newlines are tokens of the vocabulary, as in the published tokenizers. The tensors have the names of the
published checkpoints (`vision_tower.vision_model.`, `language_model.model.`); the head is the embedding.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from semel.testing.models import weights
from semel.testing.models.folder import write_folder
from semel.testing.models.text import VOCABULARY_TOKENS, text_config
from semel.testing.models.tokenizer import Vocabulary, byte_level, train

if TYPE_CHECKING:
    from transformers import Gemma3Config, Gemma3Processor, PreTrainedTokenizerFast

__all__ = ["write"]

_FAMILY = "gemma3"
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

_GAINS = {
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
    "*.v_proj.weight": 2.0,
    "*.o_proj.weight": 2.0,
    "*.gate_proj.weight": 2.0,
    "*.up_proj.weight": 2.0,
    "*.down_proj.weight": 2.0,
}
_END_GAIN = 0.7

_PUBLISHED_PREFIXES = {
    "model.vision_tower.": "vision_tower.vision_model.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.language_model.": "language_model.model.",
}


def write(directory: Path) -> None:
    """Write the model folder into `directory`, which exists."""
    from transformers import Gemma3ForConditionalGeneration, GenerationConfig

    vocabulary = train(VOCABULARY_TOKENS - len(_SPECIAL_TOKENS) - len(_NEWLINES))
    tokenizer = _tokenizer(vocabulary)
    tokenizer.chat_template = _CHAT_TEMPLATE
    config = _config(tokenizer)
    text = config.text_config
    tensors = weights.make(
        _FAMILY,
        Gemma3ForConditionalGeneration,
        config,
        _GAINS,
        head="model.language_model.embed_tokens.weight",
        tied="lm_head.weight",
        spoken=vocabulary.spoken(),
        end=text.eos_token_id,
        end_gain=_END_GAIN,
    )
    generation = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=text.pad_token_id)
    write_folder(
        directory,
        config=config,
        generation=generation,
        processor=_processor(tokenizer),
        tensors=weights.rename(tensors, _PUBLISHED_PREFIXES),
    )


def _tokenizer(vocabulary: Vocabulary) -> PreTrainedTokenizerFast:
    from tokenizers import AddedToken

    tokenizer = byte_level(vocabulary, _SPECIAL_TOKENS, _MAX_POSITIONS, named=_NAMED)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in _NEWLINES])
    return tokenizer


def _config(tokenizer: PreTrainedTokenizerFast) -> Gemma3Config:
    from transformers import Gemma3Config

    id_of = tokenizer.convert_tokens_to_ids
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


def _processor(tokenizer: PreTrainedTokenizerFast) -> Gemma3Processor:
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    images = Gemma3ImageProcessor(
        size={"height": _IMAGE_SIDE, "width": _IMAGE_SIDE}, image_mean=[0.5, 0.5, 0.5], image_std=[0.5, 0.5, 0.5]
    )
    return Gemma3Processor(images, tokenizer, chat_template=_CHAT_TEMPLATE, image_seq_length=_IMAGE_TOKENS)
