"""A tiny Qwen2-Audio: clips of up to 30 s, one `<|AUDIO|>` per 40 ms.

The tensors carry the names of the published checkpoints (`language_model.model.`, `audio_tower.`). What transformers 5
saves by itself has other names, which vLLM does not map.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from semel.testing.models import weights
from semel.testing.models.tokenizer import qwen2, train

if TYPE_CHECKING:
    from transformers import Qwen2AudioConfig, Qwen2Tokenizer

__all__ = ["write"]

_FAMILY = "qwen2-audio"
_VOCABULARY_TOKENS = 1024
_HIDDEN_SIZE = 128
_MAX_POSITIONS = 32_768
_MEL_BINS = 128

_SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|AUDIO|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
)

_CHAT_TEMPLATE = """\
{%- set clips = namespace(seen=0) -%}
{%- if messages[0].role != 'system' -%}
  {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\\n' -}}
  {%- if message.content is string -%}
    {{- message.content -}}
  {%- else -%}
    {%- for part in message.content -%}
      {%- if part.type in ('audio', 'audio_url', 'input_audio') -%}
        {%- set clips.seen = clips.seen + 1 -%}
        {{- 'Audio ' ~ clips.seen ~ ': <|audio_bos|><|AUDIO|><|audio_eos|>\\n' -}}
      {%- else -%}
        {{- part.text -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

_GAINS = {
    "*.conv1.weight": 5.0,
    "*.conv2.weight": 4.0,
    "*.embed_positions.weight": 0.3,
    "*.audio_tower.*.q_proj.weight": 1.5,
    "*.audio_tower.*.k_proj.weight": 1.5,
    "*.out_proj.weight": 0.7,
    "*.fc1.weight": 1.5,
    "*.fc2.weight": 1.5,
    "*.linear.weight": 2.5,
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

_PUBLISHED_PREFIXES = {
    "model.audio_tower.": "audio_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
}


def write(directory: Path) -> None:
    """Write the model folder into `directory`, which exists."""
    from transformers import GenerationConfig

    vocabulary = train(_VOCABULARY_TOKENS - len(_SPECIAL_TOKENS))
    tokenizer = qwen2(vocabulary, _SPECIAL_TOKENS, _MAX_POSITIONS)
    config = _config(tokenizer)
    config.save_pretrained(directory)
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    GenerationConfig(eos_token_id=ends, pad_token_id=ends[1]).save_pretrained(directory)
    _write_processor(tokenizer, directory)
    _write_weights(config, vocabulary.spoken(), directory)


def _config(tokenizer: Qwen2Tokenizer) -> Qwen2AudioConfig:
    from transformers import Qwen2AudioConfig

    id_of = tokenizer.convert_tokens_to_ids
    return Qwen2AudioConfig(
        architectures=["Qwen2AudioForConditionalGeneration"],
        dtype="float32",
        audio_token_index=id_of("<|AUDIO|>"),
        audio_config={
            "num_mel_bins": _MEL_BINS,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 128,
            "d_model": 64,
            "max_source_positions": 1500,
            "dtype": "float32",
        },
        text_config={
            "vocab_size": _VOCABULARY_TOKENS,
            "hidden_size": _HIDDEN_SIZE,
            "intermediate_size": 2 * _HIDDEN_SIZE,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": _MAX_POSITIONS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "bos_token_id": id_of("<|endoftext|>"),
            "eos_token_id": id_of("<|im_end|>"),
            "dtype": "float32",
        },
    )


def _write_processor(tokenizer: Qwen2Tokenizer, directory: Path) -> None:
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    clips = WhisperFeatureExtractor(feature_size=_MEL_BINS, return_attention_mask=True)
    tokenizer.chat_template = _CHAT_TEMPLATE
    Qwen2AudioProcessor(clips, tokenizer, chat_template=_CHAT_TEMPLATE).save_pretrained(directory)
    clips.save_pretrained(directory)


def _write_weights(config: Qwen2AudioConfig, spoken: list[int], directory: Path) -> None:
    from transformers import Qwen2AudioForConditionalGeneration

    shapes = weights.shapes(lambda: Qwen2AudioForConditionalGeneration(config))
    tensors = weights.draw(_FAMILY, shapes, _GAINS)
    weights.quieten(tensors["lm_head.weight"], spoken=spoken, end=config.text_config.eos_token_id, end_gain=_END_GAIN)
    weights.save(weights.rename(tensors, _PUBLISHED_PREFIXES), directory)
