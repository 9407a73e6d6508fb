"""What a worker says of its weights: enough to tell two models apart, and never all bytes (issue 20.3)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from semel.engine.vllm.answer_settings import _SAMPLE_BYTES, _SAMPLES, hash_weights
from semel.render.template import hash_templates

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
