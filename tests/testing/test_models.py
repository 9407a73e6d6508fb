"""The tiny models: the same bytes every time, readable by transformers alone, and moved by what they are shown."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from semel.errors import ConfigError
from semel.lab.testing.models import FAMILIES, build

Folder = Callable[[str], Path]

IMAGE_FAMILIES = ("gemma3", "idefics3", "llava", "qwen2-vl", "qwen2.5-vl")
ANSWERING = (*IMAGE_FAMILIES, "qwen2-audio", "whisper")
EACH = [pytest.param(name, marks=() if name in ANSWERING else pytest.mark.slow) for name in FAMILIES]
"""Building all of them takes a minute."""
"""Those whose answers transformers gives too. Those of all others are vLLM's: scripts/families."""

OF_VLLM = ("deepseek-vl2", "internvl-chat")
"""Those whose configuration or processor is not in transformers."""

WITHOUT_WEIGHTS = ("deepseek-vl2", "gemma3n")
SPECIAL_TEXT = {
    "gemma3": "<start_of_turn>user\n\n\n<start_of_image><image_soft_token><end_of_image>\n\nnaïve ☃<end_of_turn>\n",
    "idefics3": "User:<fake_token_around_image><row_1_col_2><image>\n\n<global-img>naïve ☃<end_of_utterance>\n",
    "llava": "<s>USER: <image>\nnaïve\t ☃ 0123</s>",
    "qwen2-audio": "<|im_start|>user\nAudio 1: <|audio_bos|><|AUDIO|><|audio_eos|>\nwas ist das? ☃<|im_end|>\n",
    "qwen2-vl": "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>naïve\t ☃ 0123<|im_end|>\n",
    "qwen2.5-vl": "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>naïve\t ☃ 0123<|im_end|>\n",
    "whisper": "<|startoftranscript|><|en|><|transcribe|><|notimestamps|> naïve ☃<|29.98|><|endoftext|>",
}


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def build_elsewhere(directory: Path, **environment: str) -> subprocess.Popen[bytes]:
    program = "import sys, pathlib, semel.lab.testing.models as m\n"
    program += "for f in m.FAMILIES: m.build(f, pathlib.Path(sys.argv[1]) / f)"
    command = [sys.executable, "-c", program, str(directory)]
    return subprocess.Popen(command, env=os.environ | environment)


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


def test_an_empty_directory_is_filled(tmp_path: Path) -> None:
    assert (build("qwen2-vl", tmp_path) / "config.json").is_file()


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


def test_families_without_weights_are_those_that_run_on_no_cpu() -> None:
    assert {name for name, model in FAMILIES.items() if model.serving.level == "processor"} == set(WITHOUT_WEIGHTS)


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


NAMES: list[tuple[str, set[str]]] = [
    ("gemma3", {"language_model.model.norm.weight", "vision_tower.vision_model.post_layernorm.weight"}),
    ("idefics3", {"model.text_model.norm.weight", "model.vision_model.post_layernorm.weight", "lm_head.weight"}),
    ("llava", {"language_model.lm_head.weight", "vision_tower.vision_model.pre_layrnorm.weight"}),
    ("qwen2-audio", {"language_model.model.norm.weight", "audio_tower.conv1.weight"}),
    ("qwen2-vl", {"model.norm.weight", "visual.patch_embed.proj.weight", "lm_head.weight"}),
    ("qwen2.5-vl", {"model.norm.weight", "visual.merger.ln_q.weight", "lm_head.weight"}),
    ("whisper", {"model.decoder.embed_tokens.weight", "model.encoder.conv1.weight"}),
    (
        "cohere2-vision",
        {"model.vision_tower.vision_model.post_layernorm.weight", "model.language_model.norm.weight"},
    ),
    ("internvl", {"language_model.lm_head.weight", "vision_tower.encoder.layer.0.lambda_1"}),
    ("internvl-chat", {"language_model.model.norm.weight", "vision_model.encoder.layers.1.ls2", "mlp1.3.bias"}),
    ("llava-next", {"image_newline", "vision_tower.vision_model.pre_layrnorm.weight"}),
    ("mistral3", {"language_model.model.norm.weight", "multi_modal_projector.patch_merger.merging_layer.weight"}),
    ("paddleocr-vl", {"mlp_AR.pre_norm.weight", "visual.vision_model.post_layernorm.weight", "model.norm.weight"}),
    ("qwen2.5-omni", {"thinker.audio_tower.conv1.weight", "thinker.visual.merger.ln_q.weight"}),
    ("qwen3-omni", {"thinker.model.layers.1.mlp.experts.3.up_proj.weight", "thinker.lm_head.weight"}),
    ("qwen3-vl", {"model.visual.deepstack_merger_list.1.norm.weight", "lm_head.weight"}),
]


@pytest.mark.parametrize(
    ("family", "names"),
    [pytest.param(*one, marks=() if one[0] in ANSWERING else pytest.mark.slow) for one in NAMES],
    ids=[family for family, _ in NAMES],
)
def test_tensors_carry_the_names_of_the_published_checkpoints(tiny: Folder, family: str, names: set[str]) -> None:
    tensors = read_tensors(tiny(family))
    assert names <= set(tensors)
    assert "proj_out.weight" not in tensors
    assert all(tensor.dtype == np.float32 and np.isfinite(tensor).all() for tensor in tensors.values())


@pytest.mark.slow
def test_experts_of_qwen3_vl_moe_have_inputs_before_outputs_as_published(tiny: Folder) -> None:
    tensors = read_tensors(tiny("qwen3-vl-moe"))
    assert tensors["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 128, 2 * 96)
    assert tensors["model.language_model.layers.0.mlp.experts.down_proj"].shape == (4, 96, 128)


@pytest.mark.parametrize("family", EACH)
def test_the_tokenizer_of_transformers_agrees_with_its_file(tiny: Folder, family: str) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    plain = Tokenizer.from_file(str(tiny(family) / "tokenizer.json"))
    loaded = AutoTokenizer.from_pretrained(tiny(family))
    text = SPECIAL_TEXT.get(family) or " naïve\t ☃ ".join(special_tokens(plain))
    ids = plain.encode(text, add_special_tokens=False).ids
    assert ids == loaded.encode(text, add_special_tokens=False)
    assert plain.decode(ids, skip_special_tokens=False) == text
    assert len(loaded) == vocabulary_size(tiny(family)) == plain.get_vocab_size()


@pytest.mark.parametrize("family", EACH)
def test_every_byte_can_be_said(tiny: Folder, family: str) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny(family) / "tokenizer.json"))
    text = "".join(map(chr, [*range(0x180), 0x20AC, 0x1F600]))
    composed = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    assert tokenizer.decode(tokenizer.encode(text).ids) == composed


def test_an_image_of_56_pixels_becomes_four_tokens(tiny: Folder) -> None:
    processor = load_processor(tiny("qwen2-vl"))
    prompt = render(processor, "image")
    assert prompt.endswith("<|vision_start|><|image_pad|><|vision_end|>What?<|im_end|>\n<|im_start|>assistant\n")
    inputs = processor(text=[prompt], images=[Image.new("RGB", (56, 56))], return_tensors="pt")
    assert tuple(inputs["pixel_values"].shape) == (16, 1176)
    assert int((inputs["input_ids"] == processor.image_token_id).sum()) == 4


@pytest.mark.parametrize(
    ("family", "tokens", "embeds"), [("gemma3", 20, 16), ("idefics3", 17 * 6 + 6, 17 * 4), ("llava", 36, 36)]
)
def test_an_image_becomes_embeddings_and_marks(tiny: Folder, family: str, tokens: int, embeds: int) -> None:
    processor = load_processor(tiny(family))
    inputs = processor(text=[processor.image_token], images=[noise_image(0)], return_tensors="pt")
    embedding = getattr(processor.tokenizer, "image_token_id", processor.image_token_id)
    ids = inputs["input_ids"][0].tolist()
    assert (len(ids), ids.count(embedding)) == (tokens, embeds)


def test_runs_of_newlines_are_tokens_of_gemma3_as_of_its_published_models(tiny: Folder) -> None:
    tokenizer = load_processor(tiny("gemma3")).tokenizer
    for count in (1, 2, 3, 4, 31):
        assert tokenizer.encode("\n" * count, add_special_tokens=False) == [tokenizer.get_vocab()["\n" * count]]


def test_a_video_has_a_token_of_its_own(tiny: Folder) -> None:
    processor = load_processor(tiny("qwen2-vl"))
    prompt = render(processor, "video")
    inputs = processor(text=[prompt], videos=[np.zeros((4, 56, 56, 3), np.uint8)], return_tensors="pt")
    assert int((inputs["input_ids"] == processor.video_token_id).sum()) == 8


def test_a_second_of_audio_becomes_25_tokens(tiny: Folder) -> None:
    processor = load_processor(tiny("qwen2-audio"))
    prompt = render(processor, "audio")
    assert "user\nAudio 1: <|audio_bos|><|AUDIO|><|audio_eos|>\nWhat?<|im_end|>" in prompt
    inputs = processor(text=[prompt], audio=[noise_clip(0)], sampling_rate=16_000, return_tensors="pt")
    assert tuple(inputs["input_features"].shape) == (1, 128, 3000)
    assert int((inputs["input_ids"] == processor.audio_token_id).sum()) == 25


def test_whisper_knows_its_languages_tasks_and_timestamps(tiny: Folder) -> None:
    tokenizer = load_processor(tiny("whisper")).tokenizer
    settings = json.loads((tiny("whisper") / "generation_config.json").read_text())
    assert settings["lang_to_id"]["<|en|>"] == tokenizer.convert_tokens_to_ids("<|en|>")
    assert settings["task_to_id"]["transcribe"] == tokenizer.convert_tokens_to_ids("<|transcribe|>")
    assert tokenizer.convert_tokens_to_ids("<|0.00|>") == settings["no_timestamps_token_id"] + 1
    assert tokenizer.convert_tokens_to_ids("<|30.00|>") == vocabulary_size(tiny("whisper")) - 1


@pytest.mark.slow
@pytest.mark.parametrize("family", ANSWERING)
def test_other_items_give_other_greedy_tokens(tiny: Folder, family: str) -> None:
    import torch

    torch.set_num_threads(1)  # threads that wait for each other on a busy machine make this 30 times slower
    model, _ = load(tiny(family))
    processor = load_processor(tiny(family))
    answers = [answer(model, inputs_for(family, processor, seed)) for seed in range(20)]
    assert len(set(answers)) >= 19
    assert sum(len(set(tokens)) >= 4 for tokens in answers) >= 19


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


def load_processor(directory: Path) -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(directory)


def special_tokens(tokenizer: Any) -> list[str]:
    return [token.content for _, token in sorted(tokenizer.get_added_tokens_decoder().items()) if token.special]


def read_tensors(directory: Path) -> dict[str, np.ndarray[Any, Any]]:
    from safetensors.numpy import load_file

    return load_file(directory / "model.safetensors")


def vocabulary_size(directory: Path) -> int:
    config = json.loads((directory / "config.json").read_text())
    config = config.get("thinker_config", config)
    texts = (config[name] for name in ("text_config", "llm_config", "language_config") if name in config)
    return int(next(texts, config)["vocab_size"])


def render(processor: Any, modality: str) -> str:
    content = [{"type": modality}, {"type": "text", "text": "What?"}]
    return str(processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True))


def noise_clip(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(scale=0.1, size=16_000).astype(np.float32)


def noise_image(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (56, 56, 3), np.uint8))


def inputs_for(family: str, processor: Any, seed: int) -> dict[str, Any]:
    if family in IMAGE_FAMILIES:
        return dict(processor(text=[render(processor, "image")], images=[noise_image(seed)], return_tensors="pt"))
    if family == "qwen2-audio":
        prompt = render(processor, "audio")
        clip = noise_clip(seed)
        return dict(processor(text=[prompt], audio=[clip], sampling_rate=16_000, return_tensors="pt"))
    return dict(processor(noise_clip(seed), sampling_rate=16_000, return_tensors="pt"), language="en")


def answer(model: Any, inputs: dict[str, Any]) -> tuple[int, ...]:
    tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0].tolist()
    return tuple(tokens[-8:])
