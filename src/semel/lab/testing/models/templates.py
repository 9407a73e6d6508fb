"""Chat templates of the declared families: turns between marks, and one text for each kind of item."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["CHATML", "chat_template"]

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
