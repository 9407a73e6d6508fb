"""Folders without weights of models whose prompts have rules of their own: enough for vLLM's processors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

__all__ = ["write_deepseek_vl2", "write_paligemma"]

_SIDE: Final = 112
_PATCH: Final = 14
_TOWER: Final = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
_TEXT: Final = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 4_096,
}


def write_paligemma(folder: Path, source: Path) -> Path:
    """An image is inserted before the text, and the prompt ends with a newline. `source` is a Gemma 3."""
    from transformers import AutoTokenizer, GemmaConfig, PaliGemmaConfig, PaliGemmaProcessor, SiglipImageProcessor

    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    images: Any = SiglipImageProcessor(size={"height": _SIDE, "width": _SIDE})
    images.image_seq_length = (_SIDE // _PATCH) ** 2
    named = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text = GemmaConfig(**_TEXT, **named, vocab_size=len(tokenizer), num_key_value_heads=1, head_dim=64)
    tower = {**_TOWER, "image_size": _SIDE, "patch_size": _PATCH, "projection_dim": 128}
    config = PaliGemmaConfig(
        text_config=text.to_dict(),
        vision_config={**tower, "model_type": "siglip_vision_model"},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=128,
        architectures=["PaliGemmaForConditionalGeneration"],
    )
    for part in (PaliGemmaProcessor(images, tokenizer), images, config):
        part.save_pretrained(folder)
    template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


def write_deepseek_vl2(folder: Path, source: Path) -> Path:
    """Up to two images are cut into tiles, more are not. `source` is a LLaVA."""
    from transformers import AutoTokenizer
    from vllm.transformers_utils.processors.deepseek_vl2 import DeepseekVLV2Processor

    sizes = [[84, 84], [84, 168], [168, 84]]
    settings: dict[str, Any] = {"candidate_resolutions": sizes, "patch_size": _PATCH, "downsample_ratio": 2}
    processor: Any = DeepseekVLV2Processor(AutoTokenizer.from_pretrained(source), **settings)
    processor.tokenizer.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({**settings, "processor_class": "DeepseekVLV2Processor"}))
    language = {
        **_TEXT,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "kv_lora_rank": 32,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "num_key_value_heads": 2,
        "vocab_size": len(processor.tokenizer),
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
    }
    vision = {"model_type": "vision", "image_size": 84, "patch_size": _PATCH, "width": 64, "layers": 2, "heads": 2}
    config = {
        "architectures": ["DeepseekVLV2ForCausalLM"],
        "model_type": "deepseek_vl_v2",
        "dtype": "float32",
        "candidate_resolutions": sizes,
        "global_view_pos": "head",
        "tile_tag": "2D",
        "language_config": language,
        "projector_config": {"model_type": "mlp_projector", "n_embed": 128, "input_dim": 64},
        "vision_config": vision,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
