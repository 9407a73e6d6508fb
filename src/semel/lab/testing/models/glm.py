"""A tiny GLM-4.1V: images and one video a prompt, each video frame as an image of its own after its time."""

from __future__ import annotations

from typing import Any

from semel.lab.testing.models import weights
from semel.lab.testing.models.declaration import Declaration, IdOf, Serving
from semel.lab.testing.models.text import HIDDEN_SIZE, NORM_EPSILON, chat_template, text_config

__all__ = ["FAMILIES"]

_MAX_POSITIONS = 65_536
_NAMED = {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}
_SPECIAL_TOKENS = (
    *_NAMED.values(),
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
    *("<|begin_of_image|>", "<|image|>", "<|end_of_image|>"),
    *("<|begin_of_video|>", "<|video|>", "<|end_of_video|>"),
)
_CHAT_TEMPLATE = chat_template(
    {
        "image": "<|begin_of_image|><|image|><|end_of_image|>",
        "video": "<|begin_of_video|><|video|><|end_of_video|>",
    },
    start="'[gMASK]<sop>'",
    turn="'<|' + message.role + '|>\\n'",
    end="''",
    answer="'<|assistant|>\\n'",
)


def _config(id_of: IdOf) -> Any:
    from transformers import Glm4vConfig

    return Glm4vConfig(
        architectures=["Glm4vForConditionalGeneration"],
        dtype="float32",
        tie_word_embeddings=False,
        image_token_id=id_of("<|image|>"),
        video_token_id=id_of("<|video|>"),
        image_start_token_id=id_of("<|begin_of_image|>"),
        image_end_token_id=id_of("<|end_of_image|>"),
        video_start_token_id=id_of("<|begin_of_video|>"),
        video_end_token_id=id_of("<|end_of_video|>"),
        text_config=text_config(
            _MAX_POSITIONS,
            bos=id_of("<|endoftext|>"),
            eos=id_of("<|endoftext|>"),
            rms_norm_eps=NORM_EPSILON,
            pad_token_id=id_of("<|pad|>"),
            tie_word_embeddings=False,
            # Half of a head is rotated, in pairs: the sections add up to a quarter of it.
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "mrope_section": [4, 6, 6],
            },
        ),
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "image_size": 112,
            "out_hidden_size": HIDDEN_SIZE,
            "dtype": "float32",
        },
    )


def _processor(tokenizer: Any) -> Any:
    from transformers import Glm4vImageProcessor, Glm4vProcessor, Glm4vVideoProcessor

    # Pixels of two frames: an image counts as that many.
    size = {"shortest_edge": 56 * 56 * 2, "longest_edge": 28 * 28 * 2 * 1_024}
    videos = Glm4vVideoProcessor(size={**size, "longest_edge": 28 * 28 * 2 * 2_048})
    return Glm4vProcessor(Glm4vImageProcessor(size=dict(size)), tokenizer, videos, chat_template=_CHAT_TEMPLATE)


FAMILIES = (
    Declaration(
        family="glm-4.1v",
        config=_config,
        shapes=weights.of_class("Glm4vForConditionalGeneration"),
        processor=_processor,
        special_tokens=_SPECIAL_TOKENS,
        named_tokens=_NAMED,
        end="<|endoftext|>",
        pad="<|pad|>",
        chat_template=_CHAT_TEMPLATE,
        gains={
            "*.patch_embed.proj.weight": 2.0,
            "*.attn.qkv.weight": 1.5,
            "*.merger.proj.weight": 2.0,
            "*.gate_up_proj.weight": 2.0,
        },
        max_positions=_MAX_POSITIONS,
        serving=Serving(max_items={"image": 4, "video": 1}),
    ),
)
