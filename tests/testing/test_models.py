"""The tiny models: the same bytes every time, and readable by transformers alone.

That other items give other answers is part of each comparison with vLLM (`Questions.min_distinct`).
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from semel.errors import ConfigError
from semel.lab.testing.models import FAMILIES, build

Folder = Callable[[str], Path]

QUICK = ("qwen2-vl", "whisper")
EACH = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
"""Building all of them takes a minute."""

OF_VLLM = ("deepseek-vl2", "internvl-chat", "minicpm-v")
"""Those whose configuration or processor is not in transformers."""

WITHOUT_WEIGHTS = ("deepseek-vl2", "gemma3n")


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def build_elsewhere(directory: Path, **environment: str) -> subprocess.Popen[bytes]:
    program = "import sys, pathlib, semel.lab.testing.models as m\n"
    program += "for f in m.FAMILIES: m.build(f, pathlib.Path(sys.argv[1]) / f)"
    command = [sys.executable, "-c", program, str(directory)]
    return subprocess.Popen(command, env=os.environ | environment)


@pytest.mark.nightly
@pytest.mark.slow
def test_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    one = build_elsewhere(tmp_path / "one", PYTHONHASHSEED="1", RAYON_NUM_THREADS="1", OMP_NUM_THREADS="1")
    two = build_elsewhere(tmp_path / "two", PYTHONHASHSEED="2", RAYON_NUM_THREADS="4", OMP_NUM_THREADS="2")
    try:
        assert [process.wait(200) for process in (one, two)] == [0, 0]
    finally:
        for process in (one, two):
            process.kill()
            process.wait()
    for family in FAMILIES:
        assert digests(tmp_path / "one" / family) == digests(tmp_path / "two" / family)


@pytest.mark.parametrize("family", EACH)
def test_a_folder_holds_what_a_published_model_holds(tiny: Folder, family: str) -> None:
    names = set(digests(tiny(family)))
    expected = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    if family not in WITHOUT_WEIGHTS:
        expected |= {"model.safetensors"}
    if family not in OF_VLLM:
        expected |= {"preprocessor_config.json", "processor_config.json"}
    assert names >= expected
    assert ("model.safetensors" in names) == (family not in WITHOUT_WEIGHTS)


def test_building_again_leaves_the_same_model_alone(tiny: Folder) -> None:
    directory = tiny("qwen2-vl")
    before = {path.name: path.stat().st_ino for path in directory.iterdir()}
    assert build("qwen2-vl", directory) == directory
    assert {path.name: path.stat().st_ino for path in directory.iterdir()} == before


def test_a_directory_with_other_files_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="holds other files"):
        build("qwen2-vl", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").touch()
    with pytest.raises(ConfigError, match="cannot write a model"):
        build("qwen2-vl", tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_unknown_family_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gemma3, .*, qwen2-vl, .*, qwen3-vl, .*, whisper"):
        build("gpt-5", tmp_path / "model")
    assert list(FAMILIES) == sorted(FAMILIES)


def test_building_leaves_the_global_random_state_alone(tmp_path: Path) -> None:
    import torch

    before = torch.random.get_rng_state()
    build("whisper", tmp_path / "model")
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_family_names_the_flags_that_vllm_serves_it_with() -> None:
    flags = FAMILIES["qwen3.5"].serving.engine_flags
    assert flags[flags.index("--dtype") + 1] == "bfloat16"
    assert flags[flags.index("--limit-mm-per-prompt") + 1] == '{"image": 4, "video": 2}'
    assert "--trust-remote-code" in FAMILIES["internvl-chat"].serving.engine_flags
    assert FAMILIES["qwen2.5-omni"].serving.modalities == ("image", "audio", "video")


@pytest.mark.parametrize("family", [one for one in EACH if one.values[0] not in {*WITHOUT_WEIGHTS, *OF_VLLM}])
def test_every_tensor_has_a_name_that_transformers_knows_and_none_is_missing(tiny: Folder, family: str) -> None:
    _, report = load(tiny(family))
    assert not {kind: names for kind, names in report.items() if names}


@pytest.mark.parametrize("family", EACH)
def test_the_tokenizer_of_transformers_agrees_with_its_file(tiny: Folder, family: str) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    plain = Tokenizer.from_file(str(tiny(family) / "tokenizer.json"))
    loaded = AutoTokenizer.from_pretrained(tiny(family))
    text = " naïve\t ☃ ".join(special_tokens(plain))
    ids = plain.encode(text, add_special_tokens=False).ids
    assert ids == loaded.encode(text, add_special_tokens=False)
    assert plain.decode(ids, skip_special_tokens=False) == text
    assert len(loaded) == vocabulary_size(tiny(family)) == plain.get_vocab_size()


PARTS = {
    "qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
}
"""Model types of which the tiny models have one part only."""


def load(directory: Path) -> tuple[Any, dict[str, Any]]:
    import transformers

    config = json.loads((directory / "config.json").read_text())
    architecture = PARTS.get(config["model_type"], *config["architectures"])
    model, report = getattr(transformers, architecture).from_pretrained(directory, output_loading_info=True)
    return model.eval(), report


def special_tokens(tokenizer: Any) -> list[str]:
    return [token.content for _, token in sorted(tokenizer.get_added_tokens_decoder().items()) if token.special]


def vocabulary_size(directory: Path) -> int:
    config = json.loads((directory / "config.json").read_text())
    config = config.get("thinker_config", config)
    texts = (config[name] for name in ("text_config", "llm_config", "language_config") if name in config)
    return int(next(texts, config)["vocab_size"])
