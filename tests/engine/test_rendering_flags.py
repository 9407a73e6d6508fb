"""The flags of vLLM that change rendering: each is honoured, harmless or refused, and none is lost on its way."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from semel.compose.pipeline import check_trust, compose_pipeline
from semel.compose.worker import engine_flags
from semel.core import Feature, Key, Media, Rendering, Target, hash_parts
from semel.engine.vllm.arguments import parse_engine_flags
from semel.engine.vllm.model.rendering import FORWARDED, HARMLESS, REFUSED, model_aliases, read_rendering
from semel.errors import ConfigError
from semel.processing import HfProcessor, Pool
from semel.processing.folder import find_folder, read_config
from semel.processing.processor import load_processor
from semel.settings.worker import WorkerSettings

Folder = Callable[[str], Path]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FLOATS = Target("float32")
CODE = """\
import time
from pathlib import Path
from transformers import LlavaNextImageProcessor

if log := LOG:
    with Path(log).open("a") as file:
        file.write("begin\\n")
        file.flush()
        time.sleep(1.5)
        file.write("end\\n")


class OwnImageProcessor(LlavaNextImageProcessor):
    def preprocess(self, *args, **options):
        output = super().preprocess(*args, **options)
        output["pixel_values"] = SIGN * output["pixel_values"]
        return output
"""


def picture(width: int = 140, height: int = 84) -> Media:
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((width, height)).convert("RGB").save(buffer, "PNG")
    return Media("image", buffer.getvalue(), "image/png")


def content(feature: Feature) -> object:
    tensors = {name: (tensor.dtype, tensor.shape, bytes(tensor.data)) for name, tensor in feature.tensors.items()}
    return feature.modality, tensors, feature.layout


def edit(path: Path, change: Mapping[str, Any]) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def copied(source: Path, target: Path) -> Path:
    """A model folder without its weights."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    return target


@pytest.fixture(scope="module")
def next_folder(tiny: Folder) -> Path:
    """A family that semel does not know."""
    return tiny("llava-next")


def with_code(source: Path, folder: Path, sign: int = -1, log: Path | None = None) -> Path:
    """The same model with an image processor of its own, whose code is in the folder, and writes when it is loaded."""
    copied(source, folder)
    named = {"auto_map": {"AutoImageProcessor": "image_processing_own.OwnImageProcessor"}}
    edit(folder / "preprocessor_config.json", named)
    whole = json.loads((folder / "processor_config.json").read_text())
    own = {**whole["image_processor"], **named, "image_processor_type": "OwnImageProcessor"}
    edit(folder / "processor_config.json", {"image_processor": own})
    code = CODE.replace("SIGN", str(sign)).replace("LOG", repr(None if log is None else str(log)))
    (folder / "image_processing_own.py").write_text(code)
    return folder


# What becomes of each flag.


def unclassified(tables: Collection[Collection[str]]) -> set[str]:
    """The fields of vLLM's configs that are not in exactly one of the tables."""
    from vllm.config import ModelConfig
    from vllm.config.multimodal import MultiModalConfig

    fields = {*ModelConfig.__dataclass_fields__, *MultiModalConfig.__dataclass_fields__}
    return {name for name in fields if sum(name in table for table in tables) != 1}


def test_every_field_of_vllm_s_configs_is_honoured_harmless_or_refused() -> None:
    assert unclassified([FORWARDED, HARMLESS, REFUSED]) == set()
    assert unclassified([FORWARDED, HARMLESS - {"seed"}, REFUSED]) == {"seed"}  # a field that is new in vLLM
    assert unclassified([FORWARDED, HARMLESS, {*REFUSED, "seed"}]) == {"seed"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--enable-mm-embeds"], "--enable-mm-embeds: semel takes no embeddings"),
        (["--enable-prompt-embeds"], "--enable-prompt-embeds: semel takes no embeddings"),
        (["--hf-config-path", "elsewhere"], "--hf-config-path: frontends read the config of the model folder"),
        (["--skip-tokenizer-init"], "--skip-tokenizer-init: semel's answers are texts"),
        (["--video-pruning-rate", "0.5"], "--video-pruning-rate: semel does not prune"),
        (["--media-io-kwargs", '{"image": {"image_mode": "RGBA"}}'], "does not know image_mode='RGBA'"),
        (["--media-io-kwargs", '{"image": {"new": 1}}'], "does not know new=1"),
        (["--media-io-kwargs", '{"vision_chunk": {"fps": 1}}'], "decodes vision_chunk by itself"),
        (["--tokenizer-mode", "mistral"], "Mistral's own format"),
        (["--config-format", "mistral"], "Mistral's own format"),
    ],
)
def test_a_flag_that_frontends_cannot_follow_is_refused_at_start_by_its_name(
    tiny: Folder, flags: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_engine_flags(str(tiny("llava")), flags)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--mm-processor-device", "cpu"],
        ["--media-io-kwargs", '{"image": {"image_mode": "RGB"}, "audio": {"audio_backend": "pyav"}}'],
        ["--media-io-kwargs", '{"video": {"num_frames": 8}}'],
        ["--tokenizer-mode", "hf"],
    ],
)
def test_a_flag_that_asks_for_what_semel_does_is_no_reason_to_refuse(tiny: Folder, flags: list[str]) -> None:
    parse_engine_flags(str(tiny("llava")), flags)


def test_mistral_s_format_is_recognised_by_its_files(tiny: Folder, tmp_path: Path) -> None:
    for name in ("params.json", "tekken.json"):
        folder = copied(tiny("llava"), tmp_path / name)
        (folder / name).write_text("{}")
        (folder / "consolidated.safetensors").touch()
        with pytest.raises(ConfigError, match="converted to Hugging Face's format"):
            parse_engine_flags(str(folder), [])
        parse_engine_flags(str(folder), ["--tokenizer-mode", "hf", "--config-format", "hf", "--load-format", "hf"])
    (folder / "params.json").write_text("{}")
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match="Mistral's own format"):
        read_config(folder)


def test_every_flag_that_is_forwarded_arrives_under_its_name(tiny: Folder, tmp_path: Path) -> None:
    from vllm.config import ModelConfig

    folder, other = tiny("qwen2-vl"), copied(tiny("qwen2-vl"), tmp_path / "other")
    assert read_rendering(ModelConfig(str(folder), dtype="float32")) == Rendering()
    flags = {
        "tokenizer": str(other),
        "tokenizer_mode": "hf",
        "config_format": "hf",
        "trust_remote_code": True,
        "code_revision": "c",
        "model_impl": "vllm",
        "hf_overrides": {"vision_config": {"spatial_merge_size": 2}},
        "media_io_kwargs": {"video": {"fps": 4}},
        "interleave_mm_strings": True,
    }
    found = read_rendering(ModelConfig(str(folder), dtype="float32", **flags))
    assert found.changed == flags
    assert {*flags, "revision", "tokenizer_revision"} == {one.name for one in dataclasses.fields(Rendering)}


def test_a_model_whose_chats_vllm_renders_by_itself_is_refused(tiny: Folder) -> None:
    from vllm.config import ModelConfig

    config = ModelConfig(str(tiny("qwen2-vl")), dtype="float32", tokenizer_mode="deepseek_v32")
    with pytest.raises(ConfigError, match="--tokenizer-mode deepseek_v32"):
        read_rendering(config)


def test_all_served_names_but_the_first_are_aliases(tiny: Folder) -> None:
    def aliases(*flags: str) -> tuple[str, ...]:
        return model_aliases(parse_engine_flags(str(tiny("llava")), flags))

    assert aliases("--served-model-name", "a", "b", "c", "b") == ("b", "c")
    assert aliases("--served-model-name", "a") == aliases() == ()


# What each does to a processor.


def test_without_such_flags_fingerprints_are_what_they_were(tiny: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Mapping[str, Any]] = []

    def watched(parts: tuple[bytes, ...]) -> Any:
        hashed.append(json.loads(parts[1]))
        return hash_parts(parts)

    monkeypatch.setattr(sys.modules["semel.processing.fingerprint"], "hash_parts", watched)
    load_processor("hf", tiny("qwen2-vl"), FLOATS)
    load_processor("vllm", tiny("qwen2-vl"), FLOATS)
    changed = Rendering(media_io_kwargs={"video": {"fps": 1}})
    load_processor("vllm", tiny("qwen2-vl"), Target("float32", rendering=changed))
    before = {"canon", "classes", "config", "processor", "target", "tokenizer", "versions"}
    assert [{*parts} - before for parts in hashed] == [set(), {"within"}, {"rendering", "within"}]
    assert all({*parts["target"]} == {"dtype", "normalisation", "options"} for parts in hashed)


def test_hf_overrides_change_the_features_as_they_change_the_engine_s(next_folder: Path) -> None:
    def layout(overrides: Mapping[str, object] | None) -> tuple[int, str]:
        target = Target("float32", rendering=Rendering(hf_overrides=overrides))
        processor = load_processor("auto", next_folder, target)
        return processor.process(picture(84, 140)).layout.num_embeds, processor.fingerprint

    changed, changed_print = layout({"image_grid_pinpoints": [[84, 168]]})
    plain, plain_print = layout(None)  # the flag that is lost
    assert changed != plain
    assert changed_print != plain_print


def test_a_known_family_takes_vllm_s_processor_where_hf_s_does_not_honour_a_flag(tiny: Folder) -> None:
    folder = tiny("qwen2-vl")
    overridden = Target("float32", rendering=Rendering(hf_overrides={"text_config": {"rope_theta": 1e5}}))
    ours, plain = load_processor("auto", folder, overridden), load_processor("auto", folder, FLOATS)
    assert ours.fingerprint.startswith("vllm:")
    assert isinstance(plain, HfProcessor)
    assert content(ours.process(picture())) == content(plain.process(picture()))
    with pytest.raises(ConfigError, match="--processor hf does not honour --hf-overrides"):
        load_processor("hf", folder, overridden)
    harmless = Rendering(interleave_mm_strings=True, trust_remote_code=True, revision="main", tokenizer_mode="hf")
    again = load_processor("auto", folder, Target("float32", rendering=harmless))
    assert again.fingerprint == plain.fingerprint


def test_another_tokenizer_is_the_tokenizer_of_prompts_and_layouts(tiny: Folder, tmp_path: Path) -> None:
    folder, other = tiny("qwen2-vl"), copied(tiny("qwen2-vl"), tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    ids = {"<|image_pad|>": 1_022, "<|video_pad|>": 1_023}  # the last two of the vocabulary, exchanged below
    vocabulary = json.loads(text)
    swapped = {ids["<|image_pad|>"]: ids["<|video_pad|>"], ids["<|video_pad|>"]: ids["<|image_pad|>"]}
    for token in vocabulary["added_tokens"]:
        token["id"] = swapped.get(token["id"], token["id"])
    for token, number in vocabulary["model"]["vocab"].items():
        vocabulary["model"]["vocab"][token] = swapped.get(number, number)
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    edit(other / "tokenizer_config.json", {"chat_template": None})
    (other / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}!{% endfor %}")
    key = Key(bytes(32))

    def pipeline(rendering: Rendering) -> Any:
        return compose_pipeline(folder, Target("float32", rendering=rendering), key)

    theirs, own = pipeline(Rendering(tokenizer=str(other))), pipeline(Rendering())
    assert theirs.tokenizer.token_id("<|image_pad|>") == own.tokenizer.token_id("<|video_pad|>")
    assert theirs.fingerprint != own.fingerprint


def test_code_of_the_model_runs_only_with_the_flag_and_is_in_the_fingerprint(next_folder: Path, tmp_path: Path) -> None:
    target = Target("float32", rendering=Rendering(trust_remote_code=True))
    folder, elsewhere = with_code(next_folder, tmp_path / "own"), with_code(next_folder, tmp_path / "elsewhere")
    other = with_code(next_folder, tmp_path / "other", sign=-2)
    own, again, changed = (load_processor("auto", place, target) for place in (folder, elsewhere, other))
    assert own.fingerprint == again.fingerprint != changed.fingerprint
    plain = load_processor("auto", next_folder, FLOATS)
    assert content(own.process(picture())) != content(plain.process(picture()))
    with pytest.raises(ConfigError, match="trust-remote-code"):
        load_processor("auto", folder, FLOATS)


def test_a_frontend_runs_code_only_if_it_was_started_with_the_flag_too() -> None:
    asks, plain = Rendering(trust_remote_code=True), Rendering()
    for rendering, trust in [(asks, True), (plain, True), (plain, False)]:
        check_trust(rendering, trust_remote_code=trust)
    with pytest.raises(ConfigError, match="start it with --trust-remote-code as well"):
        check_trust(asks, trust_remote_code=False)


def test_a_worker_hands_the_flag_to_vllm() -> None:
    def flags(trust: bool) -> list[str]:
        settings = WorkerSettings("m", "ipc:///s/w.sock", trust_remote_code=trust)
        return engine_flags(settings, ["--enforce-eager"], None)

    assert flags(True) == ["--enforce-eager", "--trust-remote-code"]
    assert flags(False) == ["--enforce-eager"]


def test_code_files_are_fetched_only_with_the_flag(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    calls: list[Mapping[str, Any]] = []

    def fetched(model: str, **options: Any) -> str:
        calls.append({"model": model, **options})
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    find_folder("org/model")
    find_folder("org/model", Rendering(trust_remote_code=True, revision="abc"))
    assert ["*.py" in call["allow_patterns"] for call in calls] == [False, True]
    assert [call["revision"] for call in calls] == [None, "abc"]


async def test_two_processes_of_a_pool_load_a_model_s_code_one_after_the_other(
    next_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    folder = with_code(next_folder, tmp_path / "own", log=log)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    target = Target("float32", rendering=Rendering(trust_remote_code=True))
    pool = await Pool.start(folder, target, processes=2, spares=0)
    try:
        made = await pool.process(picture())
    finally:
        await pool.close()
    assert made.layout.num_embeds
    assert log.read_text().split() == ["begin", "end"] * 2
    assert (tmp_path / "modules" / "transformers_modules").is_dir()
