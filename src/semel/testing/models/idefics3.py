"""A tiny Idefics3: an image in tiles, each after a mark of its row and column, and the whole image after them.

The marks and line ends between the tiles have no embedding, so a placeholder has a mask. The tensors have the names of
the published checkpoints (`model.vision_model.`, `model.connector.`, `model.text_model.`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from semel.testing.models import weights
from semel.testing.models.folder import write_folder
from semel.testing.models.text import END_GAIN, GAINS, NORM_EPSILON, VOCABULARY_TOKENS, text_config
from semel.testing.models.tokenizer import byte_level, train

if TYPE_CHECKING:
    from transformers import Idefics3Config, Idefics3Processor, PreTrainedTokenizerFast

__all__ = ["write"]

_FAMILY = "idefics3"
_MAX_POSITIONS = 32_768
_TILE_SIDE = 56
_MAX_TILES_ACROSS = 4
_PATCH_SIDE = 14
_SCALE = 2
_NAMED = {"bos_token": "<|begin_of_text|>", "eos_token": "<end_of_utterance>", "pad_token": "<|pad|>"}
_SPECIAL_TOKENS = (
    *_NAMED.values(),
    "<fake_token_around_image>",
    "<image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)

_CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
  {{- message.role | capitalize -}}
  {%- if message.content is string -%}
    {{- ': ' + message.content -}}
  {%- else -%}
    {{- ':' if message.content[0].type in ('image', 'image_url') else ': ' -}}
    {%- for part in message.content -%}
      {%- if part.type in ('image', 'image_url') -%}
        {{- '<image>' -}}
      {%- else -%}
        {{- part.text -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{- '<end_of_utterance>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- 'Assistant:' -}}
{%- endif -%}
"""

_GAINS = {
    "*.patch_embedding.weight": 2.0,
    "*.position_embedding.weight": 3.0,
    "*.vision_model.*.q_proj.weight": 1.5,
    "*.vision_model.*.k_proj.weight": 1.5,
    "*.modality_projection.proj.weight": 2.0,
    **GAINS,
}


def write(directory: Path) -> None:
    """Write the model folder into `directory`, which exists."""
    from transformers import GenerationConfig, Idefics3ForConditionalGeneration

    vocabulary = train(VOCABULARY_TOKENS - len(_SPECIAL_TOKENS))
    tokenizer = byte_level(vocabulary, _SPECIAL_TOKENS, _MAX_POSITIONS, named=_NAMED)
    tokenizer.chat_template = _CHAT_TEMPLATE
    config = _config(tokenizer)
    text = config.text_config
    tensors = weights.make(
        _FAMILY,
        Idefics3ForConditionalGeneration,
        config,
        _GAINS,
        spoken=vocabulary.spoken(),
        end=text.eos_token_id,
        end_gain=END_GAIN,
    )
    generation = GenerationConfig(eos_token_id=text.eos_token_id, pad_token_id=text.pad_token_id)
    write_folder(directory, config=config, generation=generation, processor=_processor(tokenizer), tensors=tensors)


def _config(tokenizer: PreTrainedTokenizerFast) -> Idefics3Config:
    from transformers import Idefics3Config

    id_of = tokenizer.convert_tokens_to_ids
    return Idefics3Config(
        architectures=["Idefics3ForConditionalGeneration"],
        dtype="float32",
        image_token_id=id_of("<image>"),
        pad_token_id=id_of("<|pad|>"),
        scale_factor=_SCALE,
        text_config=text_config(
            _MAX_POSITIONS,
            bos=id_of("<|begin_of_text|>"),
            eos=id_of("<end_of_utterance>"),
            model_type="llama",
            rms_norm_eps=NORM_EPSILON,
            pad_token_id=id_of("<|pad|>"),
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


def _processor(tokenizer: PreTrainedTokenizerFast) -> Idefics3Processor:
    from transformers import Idefics3ImageProcessor, Idefics3Processor

    images = Idefics3ImageProcessor(
        size={"longest_edge": _MAX_TILES_ACROSS * _TILE_SIDE}, max_image_size={"longest_edge": _TILE_SIDE}
    )
    embeds = (_TILE_SIDE // _PATCH_SIDE // _SCALE) ** 2
    return Idefics3Processor(images, tokenizer, image_seq_len=embeds, chat_template=_CHAT_TEMPLATE)
