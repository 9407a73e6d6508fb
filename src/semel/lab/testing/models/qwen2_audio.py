"""A tiny Qwen2-Audio: clips of up to 30 s, one `<|AUDIO|>` per 40 ms.

The tensors have the names of the published checkpoints (`language_model.model.`, `audio_tower.`). transformers 5 saves
other names by default, which vLLM does not map.
"""

from __future__ import annotations

from typing import Any

from semel.lab.testing.models import weights
from semel.lab.testing.models.declaration import Declaration, IdOf, Serving, prefixed
from semel.lab.testing.models.text import text_config

__all__ = ["FAMILIES"]

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


def _config(id_of: IdOf) -> Any:
    from transformers import Qwen2AudioConfig

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
        text_config=text_config(
            _MAX_POSITIONS,
            bos=id_of("<|endoftext|>"),
            eos=id_of("<|im_end|>"),
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
    )


def _processor(tokenizer: Any) -> Any:
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    clips = WhisperFeatureExtractor(feature_size=_MEL_BINS, return_attention_mask=True)
    return Qwen2AudioProcessor(clips, tokenizer, chat_template=_CHAT_TEMPLATE)


FAMILIES = (
    Declaration(
        family="qwen2-audio",
        config=_config,
        shapes=weights.of_class("Qwen2AudioForConditionalGeneration"),
        processor=_processor,
        special_tokens=_SPECIAL_TOKENS,
        end="<|im_end|>",
        stops=("<|endoftext|>",),
        pad="<|endoftext|>",
        chat_template=_CHAT_TEMPLATE,
        gains={
            "*.conv1.weight": 5.0,
            "*.conv2.weight": 4.0,
            "*.embed_positions.weight": 0.3,
            "*.audio_tower.*.q_proj.weight": 1.5,
            "*.audio_tower.*.k_proj.weight": 1.5,
            "*.out_proj.weight": 0.7,
            "*.fc1.weight": 1.5,
            "*.fc2.weight": 1.5,
            "*.linear.weight": 2.5,
            "*.embed_tokens.weight": 1.0,  # with unscaled text, clips are strong enough
        },
        published=prefixed(
            {
                "model.audio_tower.": "audio_tower.",
                "model.multi_modal_projector.": "multi_modal_projector.",
                "model.language_model.": "language_model.model.",
                "lm_head.": "language_model.lm_head.",
            }
        ),
        serving=Serving(max_items={"audio": 3}),
    ),
)
