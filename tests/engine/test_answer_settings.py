"""What a worker says of its weights: enough to tell two models apart, and never all bytes (issue 20.3)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import msgspec
import pytest

from semel.core import AnswerSettings, Rendering
from semel.engine.vllm.arguments import create_config, parse_engine_flags, take_parser_flags
from semel.engine.vllm.contract import _SAMPLE_BYTES, _SAMPLES, answer_settings, hash_weights
from semel.render.chat.template import hash_templates

NBYTES = 1 << 20


def weights(folder: Path, *, name: str = "w", fill: int = 0, nbytes: int = NBYTES) -> Path:
    """A folder with one safetensors file."""
    folder.mkdir()
    header = json.dumps({name: {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes([fill]) * nbytes)
    return folder


def test_copies_of_the_same_weights_have_the_same_hash(tmp_path: Path) -> None:
    first, copy = weights(tmp_path / "a"), tmp_path / "b"
    shutil.copytree(first, copy)
    assert hash_weights(first, "r1", "None") == hash_weights(copy, "r1", "None")


def test_other_names_sizes_numbers_revisions_and_quantizations_have_others(tmp_path: Path) -> None:
    """Control: sizes alone, which are equal for three of the folders."""
    plain = weights(tmp_path / "plain")
    found = {
        hash_weights(plain, "r1", "None"),
        hash_weights(plain, "r2", "None"),
        hash_weights(plain, "r1", "fp8"),
        hash_weights(plain, "r1", "None", is_dummy=True),
        hash_weights(weights(tmp_path / "named", name="v"), "r1", "None"),
        hash_weights(weights(tmp_path / "tuned", fill=1), "r1", "None"),
        hash_weights(weights(tmp_path / "larger", nbytes=NBYTES + 1), "r1", "None"),
        hash_weights(tmp_path, "r1", "None"),
    }
    assert len(found) == 8
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("plain", "named", "tuned")]
    assert len(set(sizes)) == 1


def test_of_large_weights_only_a_part_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = weights(tmp_path / "a", nbytes=64 << 20)
    read = 0
    opened: Callable[..., Any] = Path.open

    class Counting:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def seek(self, offset: int) -> None:
            self._file.seek(offset)

        def read(self, size: int) -> bytes:
            nonlocal read
            found: bytes = self._file.read(size)
            read += len(found)
            return found

    monkeypatch.setattr(Path, "open", lambda path, *words: Counting(opened(path, *words)))
    hash_weights(folder, None, "None")
    assert _SAMPLES * _SAMPLE_BYTES <= read < 1 << 20


def test_a_chat_template_that_differs_in_one_letter_has_another_hash(tmp_path: Path) -> None:
    hashes = []
    for text in ("{{ messages }}", "{{ messages }} "):
        (tmp_path / "chat_template.jinja").write_text(text)
        hashes.append(hash_templates(tmp_path, tmp_path))
    assert len(set(hashes)) == 2
    (tmp_path / "chat_template.jinja").unlink()
    assert hash_templates(tmp_path, tmp_path) == ""


@pytest.mark.engine
def test_flags_of_vllm_and_files_of_the_model_are_in_the_settings(tiny: Callable[[str], Path]) -> None:
    """Control: the same flags again, which are equal after a trip over the wire."""
    folder = tiny("qwen2-vl")
    override = ("--override-generation-config", '{"temperature": 0.3}')
    reading = ("--tool-call-parser", "hermes", "--enable-auto-tool-choice", "--reasoning-parser", "qwen3")
    plain, again, cool, parsed = (settings(folder, *flags) for flags in ((), (), override, reading))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=AnswerSettings) == again
    assert replace(cool, generation_config=plain.generation_config) == plain
    assert cool.generation_config["temperature"] == 0.3
    assert (parsed.tool_call_parser, parsed.enable_auto_tool_choice, parsed.reasoning_parser) == (
        "hermes",
        True,
        "qwen3",
    )
    assert plain.weights == hash_weights(folder, None, "None")
    assert plain.chat_template


def settings(folder: Path, *flags: str) -> AnswerSettings:
    """Those of vLLM's own configuration; no engine starts."""
    parsers, others = take_parser_flags(["--dtype", "float32", "--enforce-eager", *flags])
    config = create_config(parse_engine_flags(str(folder), others))
    llm = SimpleNamespace(model_config=config.model_config, vllm_config=config)
    return answer_settings(llm, parsers, folder, Rendering())
