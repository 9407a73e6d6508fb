"""The language model of the tiny families, two layers of 128 channels over 1,024 tokens, and their chat templates.

This part is the same in all of them. A family adds its tower and its special tokens, and the differences of its text
model. Whisper, whose decoder is of another kind, uses nothing from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

__all__ = [
    "CHATML",
    "END_GAIN",
    "GAINS",
    "HIDDEN_SIZE",
    "NORM_EPSILON",
    "VOCABULARY_TOKENS",
    "chat_template",
    "text_config",
]

VOCABULARY_TOKENS = 1024
HIDDEN_SIZE = 128

GAINS = MappingProxyType(
    {
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
)
END_GAIN = 0.9
# Not negligible next to the variance of a token embedding: the first norm dampens text, so that the larger items stand
# out.
NORM_EPSILON = 0.1


def text_config(max_positions: int, *, bos: int, eos: int, **own: Any) -> dict[str, Any]:
    """Return the `text_config` of a family; `own` has the values of that family only."""
    return {
        "vocab_size": VOCABULARY_TOKENS,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 2 * HIDDEN_SIZE,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": max_positions,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "dtype": "float32",
        **own,
    }


CHATML: Mapping[str, str] = {
    "turn": "'<|im_start|>' + message.role + '\\n'",
    "end": "'<|im_end|>\\n'",
    "answer": "'<|im_start|>assistant\\n'",
}

_PART_TYPES = {
    "image": "('image', 'image_url')",
    "video": "('video', 'video_url')",
    "audio": "('audio', 'audio_url', 'input_audio')",
}

_TEMPLATE = """\
{%- macro render(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- else -%}
    {%- for part in content -%}
      {%- if part.type == 'text' -%}
        {{- part.text -}}
@ITEMS@      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{{- @START@ -}}
{%- for message in messages -%}
  {{- @TURN@ + render(message.content) + @END@ -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- @ANSWER@ -}}
{%- endif -%}
"""

_ITEM = """\
      {%- elif part.type in @TYPES@ -%}
        {{- @TEXT@ -}}
"""


def chat_template(items: Mapping[str, str], *, start: str = "''", turn: str, end: str, answer: str) -> str:
    """Return a template that writes an item as `items` says for its modality.

    `start` begins the prompt, `turn` and `end` surround a message, and `answer` begins the model's own: each is a Jinja
    expression. Items are plain text.
    """
    branches = (
        _ITEM.replace("@TYPES@", _PART_TYPES[modality]).replace("@TEXT@", repr(text))
        for modality, text in items.items()
    )
    text = _TEMPLATE.replace("@ITEMS@", "".join(branches)).replace("@START@", start).replace("@TURN@", turn)
    return text.replace("@END@", end).replace("@ANSWER@", answer)
