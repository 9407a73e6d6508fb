"""What the encoder of an engine is: every part of it changes its identity, and nothing else does."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from semel.engine.vllm.model import identity
from semel.engine.vllm.model.identity import encoder_identity, hash_weights, identity_parts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

Tensors = Mapping[str, tuple[str, list[int], bytes]]
TENSORS: Tensors = {
    "visual.blocks.0.weight": ("F32", [4], b"tower bytes 0123"),
    "visual.merger.weight": ("F32", [2], b"merger 0"),
    "model.layers.0.weight": ("F32", [4], b"language model 0"),
    "model.embed_tokens.weight": ("F32", [2], b"tokens 0"),
}


def write(folder: Path, tensors: Tensors, name: str = "model.safetensors") -> Path:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    content = b""
    for tensor, (dtype, shape, data) in tensors.items():
        header[tensor] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(content), len(content) + len(data)],
        }
        content += data
    encoded = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(struct.pack("<Q", len(encoded)) + encoded + content)
    return folder


def is_language_model(name: str) -> bool:
    return name.startswith("model.layers.")


def changed(**tensors: tuple[str, list[int], bytes]) -> Tensors:
    return {**TENSORS, **{name.replace("__", "."): value for name, value in tensors.items()}}


@pytest.mark.parametrize(
    ("tensors", "is_same"),
    [
        (TENSORS, True),
        (dict(reversed(list(TENSORS.items()))), True),
        (changed(model__layers__0__weight=("F32", [4], b"language model 1")), True),
        (changed(visual__blocks__0__weight=("F32", [4], b"tower bytes 0124")), False),
        (changed(visual__blocks__0__weight=("I32", [4], b"tower bytes 0123")), False),
        (changed(visual__blocks__0__weight=("F32", [2, 2], b"tower bytes 0123")), False),
        (changed(visual__merger__weight=("F32", [2], b"merger 1")), False),
        (changed(model__embed_tokens__weight=("F32", [2], b"tokens 1")), False),
        ({name: value for name, value in TENSORS.items() if "merger" not in name}, False),
        ({name.replace("merger", "murmur"): value for name, value in TENSORS.items()}, False),
    ],
)
def test_a_byte_of_the_tower_changes_the_weights_and_the_language_model_does_not(
    tmp_path: Path, tensors: Tensors, is_same: bool
) -> None:
    expected = hash_weights(write(tmp_path / "a", TENSORS), is_language_model)
    found = hash_weights(write(tmp_path / "b", tensors), is_language_model)
    assert (found == expected) is is_same


def test_how_tensors_are_spread_over_files_is_no_part_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    for number, (name, value) in enumerate(TENSORS.items()):
        write(folder, {name: value}, f"model-{number}.safetensors")
    expected = hash_weights(write(tmp_path / "whole", TENSORS), is_language_model)
    assert hash_weights(folder, is_language_model) == expected


def test_mutant_a_hash_of_names_alone_does_not_see_a_changed_tower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity._Tensor, "content", lambda _: iter(()))
    other = changed(visual__blocks__0__weight=("F32", [4], b"tower bytes 0124"))
    first, second = write(tmp_path / "a", TENSORS), write(tmp_path / "b", other)
    assert hash_weights(first, is_language_model) == hash_weights(second, is_language_model)


@pytest.fixture(scope="module")
def config(tiny: Callable[[str], Path]) -> Any:
    from semel.engine.vllm.arguments import create_config, parse_engine_flags

    return create_config(parse_engine_flags(str(tiny("qwen2-vl")), ["--dtype", "float32"]))


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path]) -> Path:
    return tiny("qwen2-vl")


def test_the_same_engine_has_the_same_identity_in_another_folder(config: Any, folder: Path, tmp_path: Path) -> None:
    found = encoder_identity(config, folder)
    assert found is not None
    assert len(found) == 32
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    assert encoder_identity(config, copy) == found


def test_the_tower_of_a_real_model_is_hashed_and_its_language_model_is_not(
    config: Any, folder: Path, tmp_path: Path
) -> None:
    expected = encoder_identity(config, folder)
    for part, is_same in (("visual.", False), ("layers.", True)):
        copy = Path(shutil.copytree(folder, tmp_path / part))
        path = next(iter(copy.glob("*.safetensors")))
        tensor = next(
            one
            for one in identity._tensors(path)
            if part in one.name and (is_same is ("visual" not in one.name)) and "embed" not in one.name
        )
        content = bytearray(path.read_bytes())
        content[tensor.start] ^= 1
        path.unlink()  # it may be a link to the shared one
        path.write_bytes(content)
        assert (encoder_identity(config, copy) == expected) is is_same, tensor.name


CHANGES: list[tuple[str, Any]] = [
    ("model_config.dtype", "torch.bfloat16"),
    ("model_config.quantization", "fp8"),
    ("model_config.hf_config.vision_config.depth", 17),
    ("model_config.multimodal_config.mm_encoder_tp_mode", "data"),
    ("model_config.multimodal_config.mm_encoder_attn_backend", SimpleNamespace(name="OTHER")),
    ("model_config.multimodal_config.mm_encoder_attn_dtype", "fp8"),
    ("model_config.multimodal_config.mm_encoder_fp8_scale_path", "a file"),
    ("model_config.multimodal_config.mm_device_do_normalize", "other"),
    ("model_config.multimodal_config.video_pruning_rate", 0.5),
    ("parallel_config.tensor_parallel_size", 2),
    ("compilation_config.mode", "other"),
    ("compilation_config.backend", "other"),
    ("compilation_config.custom_ops", ["other"]),
    ("compilation_config.compile_mm_encoder", "other"),
    ("compilation_config.cudagraph_mm_encoder", "other"),
]


@pytest.mark.parametrize(("path", "value"), CHANGES, ids=[path for path, _ in CHANGES])
def test_every_setting_of_the_encoder_changes_its_identity(
    config: Any, folder: Path, path: str, value: Any, tmp_path: Path
) -> None:
    *owners, name = path.split(".")
    owner = config
    for one in owners:
        owner = getattr(owner, one)
    if value == "a file":
        value = str(tmp_path / "scales.json")
        (tmp_path / "scales.json").write_text("{}")
    before, expected = getattr(owner, name), encoder_identity(config, folder)
    object.__setattr__(owner, name, value)
    try:
        assert encoder_identity(config, folder) != expected
    finally:
        object.__setattr__(owner, name, before)
    assert encoder_identity(config, folder) == expected


@pytest.mark.parametrize("part", ["vllm", "torch", "device", "capability", "processor", "architecture"])
def test_versions_and_the_machine_change_its_identity(
    config: Any, folder: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from vllm.platforms import current_platform

    expected = encoder_identity(config, folder)
    if part == "vllm":
        monkeypatch.setattr(identity, "installed_version", lambda: "0.32.9")
    elif part == "torch":
        monkeypatch.setattr(torch, "__version__", "9.9")
    elif part == "device":
        monkeypatch.setattr(type(current_platform), "get_device_name", lambda *_: "other")
    elif part == "capability":
        monkeypatch.setattr(identity, "_capability", lambda _: "9.0")
    elif part == "processor":
        monkeypatch.setattr(identity, "_processor", lambda: ["other"])
    else:
        monkeypatch.setattr(type(config.model_config), "architecture", "Other")
    assert encoder_identity(config, folder) != expected


def test_the_language_models_settings_and_the_name_of_the_folder_do_not_change_it(config: Any) -> None:
    parts = json.dumps(identity_parts(config), sort_keys=True, default=str)
    assert "text_config" not in parts
    assert str(config.model_config.model) not in parts


@pytest.mark.parametrize("load_format", ["dummy", "gguf", "sharded_state", "runai_streamer", "tensorizer"])
def test_weights_that_are_not_in_the_folders_files_have_no_identity(
    config: Any, folder: Path, load_format: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(config.load_config, "load_format", load_format)
    with caplog.at_level("WARNING"):
        assert encoder_identity(config, folder) is None
    assert f"--load-format {load_format}" in caplog.text


def test_a_folder_without_such_files_or_with_broken_ones_has_no_identity(
    config: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        assert encoder_identity(config, tmp_path) is None
    assert "no safetensors files" in caplog.text
    whole = (write(tmp_path, TENSORS) / "model.safetensors").read_bytes()
    for content in (b"", b"\xff" * 16, whole[:40], whole[:-20], whole[:8] + b"[" + whole[9:]):
        (tmp_path / "model.safetensors").write_bytes(content)
        assert encoder_identity(config, tmp_path) is None
