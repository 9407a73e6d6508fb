"""A model folder without weights: a byte-level tokenizer with placeholder tokens, chat templates of both formats."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from semel.core import Modality
from semel.render import ChatRenderer, ChatTemplate, Tokenizer

PLACEHOLDERS: dict[Modality, str] = {"image": "<|image_pad|>", "audio": "<|AUDIO|>", "video": "<|video_pad|>"}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *PLACEHOLDERS.values()]

PARTS_TEMPLATE = """\
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\\n' -}}
  {%- if message.content is string -%}
    {{- message.content -}}
  {%- else -%}
    {%- for part in message.content -%}
      {%- if part.type == 'image' -%}<|image_pad|>
      {%- elif part.type == 'audio' -%}<|AUDIO|>
      {%- elif part.type == 'video' -%}<|video_pad|>
      {%- elif part.type == 'tool_reference' -%}[{{ part.name }}]
      {%- else -%}{{- part.text -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {%- for call in message.tool_calls or [] -%}{{- call | tojson -}}{%- endfor -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

STRING_TEMPLATE = """\
{%- if tools %}{{ tools }}{% endif -%}
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' -}}
{%- endfor -%}
{{- hint or '' -}}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def insertion(modality: Modality, index: int, /) -> str:
    return f"Audio {index}: <|AUDIO|>" if modality == "audio" else PLACEHOLDERS[modality]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def write_model(directory: Path) -> Path:
    """Write its files into a folder."""
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    sentences = ["<|image_pad|> is a token of images, |> is not", "hello there, what is in this picture?"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, min_frequency=1, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    raw.train_from_iterator(sentences, trainer)
    raw.save(str(directory / "tokenizer.json"))
    config = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(PARTS_TEMPLATE)
    return directory


@pytest.fixture(scope="session")
def parts_renderer(folder: Path) -> ChatRenderer:
    """Its template takes a list of parts."""
    return ChatRenderer(ChatTemplate.load(folder), Tokenizer.load(folder), PLACEHOLDERS, insertion)


@pytest.fixture(scope="session")
def string_renderer(folder: Path) -> ChatRenderer:
    """Its template takes strings, trims them and prints tools as Python does."""
    template = ChatTemplate.load(folder, override=STRING_TEMPLATE)
    return ChatRenderer(template, Tokenizer.load(folder), PLACEHOLDERS, insertion)


@pytest.fixture(scope="session")
def pixel() -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(b"png").decode()}}


@pytest.fixture(scope="session")
def clip() -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(b"wav").decode(), "format": "wav"}}
