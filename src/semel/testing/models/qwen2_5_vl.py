"""A tiny Qwen2.5-VL: as Qwen2-VL, but its tower looks at windows of an image, and its positions know about time.

The tensors carry the names of the published checkpoints (`visual.`, `model.`, `lm_head.`), which both transformers and
vLLM map to their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from semel.testing.models import weights
from semel.testing.models.qwen2_vl import CHAT_TEMPLATE, GAINS, SPECIAL_TOKENS, image_size
from semel.testing.models.tokenizer import qwen2, train

if TYPE_CHECKING:
    from transformers import Qwen2_5_VLConfig, Qwen2Tokenizer

__all__ = ["write"]

_FAMILY = "qwen2.5-vl"
_VOCABULARY_TOKENS = 1024
_HIDDEN_SIZE = 128
_MAX_POSITIONS = 65_536
_END_GAIN = 0.9
_NORM_EPSILON = 0.1

_PUBLISHED_PREFIXES = {"model.visual.": "visual.", "model.language_model.": "model.", "lm_head.": "lm_head."}


def write(directory: Path) -> None:
    """Write the model folder into `directory`, which exists."""
    from transformers import GenerationConfig

    vocabulary = train(_VOCABULARY_TOKENS - len(SPECIAL_TOKENS))
    tokenizer = qwen2(vocabulary, SPECIAL_TOKENS, _MAX_POSITIONS)
    config = _config(tokenizer)
    config.save_pretrained(directory)
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    GenerationConfig(eos_token_id=ends, pad_token_id=ends[1]).save_pretrained(directory)
    _write_processor(tokenizer, directory)
    _write_weights(config, vocabulary.spoken(), directory)


def _config(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLConfig:
    from transformers import Qwen2_5_VLConfig

    id_of = tokenizer.convert_tokens_to_ids
    return Qwen2_5_VLConfig(
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        dtype="float32",
        image_token_id=id_of("<|image_pad|>"),
        video_token_id=id_of("<|video_pad|>"),
        vision_start_token_id=id_of("<|vision_start|>"),
        vision_end_token_id=id_of("<|vision_end|>"),
        text_config={
            "vocab_size": _VOCABULARY_TOKENS,
            "hidden_size": _HIDDEN_SIZE,
            "intermediate_size": 2 * _HIDDEN_SIZE,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": _MAX_POSITIONS,
            "rms_norm_eps": _NORM_EPSILON,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
            "bos_token_id": id_of("<|endoftext|>"),
            "eos_token_id": id_of("<|im_end|>"),
            "dtype": "float32",
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": _HIDDEN_SIZE,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
            "dtype": "float32",
        },
    )


def _write_processor(tokenizer: Qwen2Tokenizer, directory: Path) -> None:
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    images = Qwen2VLImageProcessor(size=image_size())
    videos = Qwen2VLVideoProcessor(size=image_size())
    tokenizer.chat_template = CHAT_TEMPLATE
    Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=CHAT_TEMPLATE).save_pretrained(directory)
    images.save_pretrained(directory)


def _write_weights(config: Qwen2_5_VLConfig, spoken: list[int], directory: Path) -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    shapes = weights.shapes(lambda: Qwen2_5_VLForConditionalGeneration(config))
    tensors = weights.draw(_FAMILY, shapes, GAINS)
    weights.quieten(tensors["lm_head.weight"], spoken=spoken, end=config.text_config.eos_token_id, end_gain=_END_GAIN)
    weights.save(weights.rename(tensors, _PUBLISHED_PREFIXES), directory)
