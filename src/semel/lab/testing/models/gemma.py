"""Tiny models of Google's newer families; Gemma 3 has a module of its own.

Gemma 4 takes images and videos of their own size. PaliGemma puts one image before the text, without a mark in it.
Gemma 3n has no weights: its tower is one of timm's, of one size, and that is not tiny.
"""

from __future__ import annotations

from typing import Any

from semel.lab.testing.models import weights
from semel.lab.testing.models.declaration import Declaration, IdOf, Serving, prefixed
from semel.lab.testing.models.text import VOCABULARY_TOKENS, chat_template, text_config

__all__ = ["FAMILIES"]

_MAX_POSITIONS = 32_768
_SIDE = 112
_PATCH_SIDE = 14
_LOCATIONS = 1024 + 128
"""Tokens of places and masks that the processor of PaliGemma adds to its tokenizer."""

_NAMED = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
_GEMMA4_NAMED = {
    **_NAMED,
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}
_GEMMA3N_NAMED = {
    **_NAMED,
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "audio_token": "<audio_soft_token>",
    "boa_token": "<start_of_audio>",
    "eoa_token": "<end_of_audio>",
}
_NEWLINES = tuple("\n" * count for count in range(1, 32))


def _template(items: dict[str, str], start: str, end: str) -> str:
    return chat_template(
        items,
        start="bos_token",
        turn=f"'{start}' + ('model' if message.role == 'assistant' else message.role) + '\\n'",
        end=f"'{end}\\n'",
        answer=f"'{start}model\\n'",
    )


_GEMMA4_TEMPLATE = _template({"image": "<|image|>", "video": "<|video|>"}, "<|turn>", "<turn|>")
_GEMMA3N_TEMPLATE = _template(
    {"image": "<image_soft_token>", "audio": "<audio_soft_token>"}, "<start_of_turn>", "<end_of_turn>"
)
_PALIGEMMA_TEMPLATE = chat_template({"image": ""}, start="bos_token", turn="''", end="''", answer="'\\n'")


def _gemma4(id_of: IdOf) -> Any:
    from transformers import Gemma4Config

    return Gemma4Config(
        architectures=["Gemma4ForConditionalGeneration"],
        dtype="float32",
        image_token_id=id_of("<|image|>"),
        video_token_id=id_of("<|video|>"),
        audio_token_id=id_of("<|audio|>"),
        boi_token_id=id_of("<|image>"),
        eoi_token_id=id_of("<image|>"),
        boa_token_id=id_of("<|audio>"),
        eoa_token_index=id_of("<audio|>"),
        audio_config=None,
        text_config=text_config(
            _MAX_POSITIONS,
            bos=id_of("<bos>"),
            eos=id_of("<eos>"),
            pad_token_id=id_of("<pad>"),
            head_dim=64,
            global_head_dim=64,
            sliding_window=512,
            layer_types=["sliding_attention", "full_attention"],
            vocab_size_per_layer_input=VOCABULARY_TOKENS,
            hidden_size_per_layer_input=0,
        ),
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "position_embedding_size": 1_024,
            "default_output_length": 70,  # vLLM reads it; the class of the configuration has no such value
            "dtype": "float32",
        },
    )


def _gemma4_processor(tokenizer: Any) -> Any:
    from transformers import (
        Gemma4AudioFeatureExtractor,
        Gemma4ImageProcessor,
        Gemma4Processor,
        Gemma4VideoProcessor,
    )

    return Gemma4Processor(
        Gemma4AudioFeatureExtractor(),
        Gemma4ImageProcessor(max_soft_tokens=70),
        tokenizer,
        Gemma4VideoProcessor(max_soft_tokens=70, num_frames=8),
        chat_template=_GEMMA4_TEMPLATE,
        image_seq_length=70,
    )


def _gemma3n(id_of: IdOf) -> Any:
    from transformers import Gemma3nConfig

    return Gemma3nConfig(
        architectures=["Gemma3nForConditionalGeneration"],
        dtype="float32",
        image_token_id=id_of("<image_soft_token>"),
        boi_token_id=id_of("<start_of_image>"),
        eoi_token_id=id_of("<end_of_image>"),
        audio_token_id=id_of("<audio_soft_token>"),
        boa_token_id=id_of("<start_of_audio>"),
        eoa_token_id=id_of("<end_of_audio>"),
        text_config=text_config(
            _MAX_POSITIONS,
            bos=id_of("<bos>"),
            eos=id_of("<eos>"),
            pad_token_id=id_of("<pad>"),
            head_dim=64,
            layer_types=["sliding_attention", "full_attention"],
            num_kv_shared_layers=0,
            vocab_size_per_layer_input=VOCABULARY_TOKENS,
        ),
    )


def _gemma3n_processor(tokenizer: Any) -> Any:
    from transformers import Gemma3nAudioFeatureExtractor, Gemma3nProcessor, SiglipImageProcessor

    images = SiglipImageProcessor(size={"height": 768, "width": 768})
    return Gemma3nProcessor(
        Gemma3nAudioFeatureExtractor(), images, tokenizer, chat_template=_GEMMA3N_TEMPLATE, image_seq_length=256
    )


def _paligemma(id_of: IdOf) -> Any:
    from transformers import PaliGemmaConfig

    vocabulary = VOCABULARY_TOKENS + _LOCATIONS
    return PaliGemmaConfig(
        architectures=["PaliGemmaForConditionalGeneration"],
        dtype="float32",
        image_token_index=id_of("<image>"),
        bos_token_id=id_of("<bos>"),
        eos_token_id=id_of("<eos>"),
        vocab_size=vocabulary,
        hidden_size=128,
        projection_dim=128,
        text_config={
            **text_config(_MAX_POSITIONS, bos=id_of("<bos>"), eos=id_of("<eos>"), model_type="gemma", head_dim=64),
            "vocab_size": vocabulary,
        },
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": _SIDE,
            "patch_size": _PATCH_SIDE,
            "vision_use_head": False,
            "dtype": "float32",
        },
    )


def _paligemma_processor(tokenizer: Any) -> Any:
    from transformers import PaliGemmaProcessor, SiglipImageProcessor

    images = SiglipImageProcessor(size={"height": _SIDE, "width": _SIDE})
    images.image_seq_length = (_SIDE // _PATCH_SIDE) ** 2
    return PaliGemmaProcessor(images, tokenizer, chat_template=_PALIGEMMA_TEMPLATE)


_GAINS = {
    "*.vision_tower.*norm*.weight": 1.0,
    "*.language_model.norm.weight": 30.0,
    "*.patch_embedding.weight": 2.0,
    "*.position_embedding.weight": 3.0,
    "*.vision_tower.*.q_proj*.weight": 1.5,
    "*.vision_tower.*.k_proj*.weight": 1.5,
    "*.multi_modal_projector.linear.weight": 2.0,
    "*.embedding_projection.weight": 2.0,
    "*.position_embedding_table": 100.0,
    "*.input_proj.weight": 2.0,
    "*.embed_tokens.weight": 0.01,
}

FAMILIES = (
    Declaration(
        family="gemma4",
        config=_gemma4,
        shapes=weights.of_class("Gemma4ForConditionalGeneration"),
        processor=_gemma4_processor,
        special_tokens=(*_GEMMA4_NAMED.values(), "<|video|>", "<|turn>", "<turn|>"),
        named_tokens=_GEMMA4_NAMED,
        end="<eos>",
        pad="<pad>",
        chat_template=_GEMMA4_TEMPLATE,
        gains=_GAINS,
        end_gain=0.7,
        head="model.language_model.embed_tokens.weight",
        tied="lm_head.weight",
        serving=Serving(max_items={"image": 4, "video": 2}),
    ),
    Declaration(
        family="gemma3n",
        config=_gemma3n,
        shapes=None,
        processor=_gemma3n_processor,
        special_tokens=(*_GEMMA3N_NAMED.values(), "<start_of_turn>", "<end_of_turn>"),
        plain_tokens=_NEWLINES,
        named_tokens=_GEMMA3N_NAMED,
        end="<eos>",
        pad="<pad>",
        chat_template=_GEMMA3N_TEMPLATE,
        serving=Serving(max_items={"image": 4, "audio": 3}, level="processor"),
    ),
    Declaration(
        family="paligemma",
        config=_paligemma,
        shapes=weights.of_class("PaliGemmaForConditionalGeneration"),
        processor=_paligemma_processor,
        special_tokens=(*_NAMED.values(), "<image>"),
        plain_tokens=("\n",),  # vLLM's processor wants it in the vocabulary
        named_tokens={**_NAMED, "image_token": "<image>"},
        end="<eos>",
        pad="<pad>",
        chat_template=_PALIGEMMA_TEMPLATE,
        gains={**_GAINS, "*.language_model.*norm.weight": 0.0},  # Gemma adds 1 to the scale of a norm
        end_gain=0.7,
        head="model.language_model.embed_tokens.weight",
        tied="lm_head.weight",
        published=prefixed(
            {
                "model.vision_tower.": "vision_tower.vision_model.",
                "model.multi_modal_projector.": "multi_modal_projector.",
                "model.language_model.": "language_model.model.",
            }
        ),
        serving=Serving(max_items={"image": 1}),
    ),
)
