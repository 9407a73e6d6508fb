"""A tiny model that can reason and call tools: its words are chance, but its tokenizer has the marks for both."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

__all__ = ["CALL_END", "CALL_START", "THINK_END", "THINK_START", "speaking"]

THINK_START: Final = 1013
THINK_END: Final = 1014
CALL_START: Final = 1015
CALL_END: Final = 1016
_MARKS: Final = {
    "<|object_ref_start|>": "<think>",
    "<|object_ref_end|>": "</think>",
    "<|box_start|>": "<tool_call>",
    "<|box_end|>": "</tool_call>",
}
_TOOLS: Final = "{%- if tools -%}{{- 'Tools: ' + (tools | tojson) + '\\n' -}}{%- endif -%}\n"
_NO_THOUGHTS: Final = (
    "{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false -%}"
    "{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}\n"
)


def speaking(qwen2_vl: Path, folder: Path) -> Path:
    """The tiny Qwen2-VL in a folder of its own, with marks for reasoning and calls in place of tokens nobody uses."""
    shutil.copytree(qwen2_vl, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        if token["content"] in _MARKS:
            token |= {"content": _MARKS[token["content"]], "special": False}
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {_MARKS.get(token, token): number for token, number in vocabulary.items()}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["extra_special_tokens"] = [token for token in config["extra_special_tokens"] if token not in _MARKS]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    template = folder / "chat_template.jinja"
    text = template.read_text().replace("{%- for message in messages", _TOOLS + "{%- for message in messages", 1)
    template.write_text(text + _NO_THOUGHTS)
    return folder
