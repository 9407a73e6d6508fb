from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from semel.errors import ConfigError, InvalidRequest
from semel.render import Tokenizer


def test_a_missing_tokenizer_json_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json: save one"):
        Tokenizer.load(tmp_path)


def test_a_damaged_tokenizer_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.load(tmp_path)


def test_truncation_and_padding_of_the_file_are_switched_off(folder: Path, tmp_path: Path) -> None:
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    raw.enable_truncation(3)
    raw.enable_padding(length=64)
    raw.save(str(tmp_path / "tokenizer.json"))
    text = "hello there, what is in this picture?"
    assert Tokenizer.load(tmp_path).encode(text) == Tokenizer.load(folder).encode(text)


def test_special_tokens_are_added_around_the_text_only_on_demand(folder: Path, tmp_path: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    end = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, end],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("hi", add_special_tokens=True) == [*tokenizer.encode("hi"), 0]


def test_half_a_surrogate_pair_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="half of a surrogate pair"):
        Tokenizer.load(folder).encode("a\ud83d")
