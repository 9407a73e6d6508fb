"""A tiny PaddleOCR-VL: images of their own size, every patch by itself until the projector merges four."""

from __future__ import annotations

from typing import Any

from semel.lab.testing.models import weights
from semel.lab.testing.models.declaration import Declaration, IdOf, Serving, prefixed
from semel.lab.testing.models.text import NORM_EPSILON, chat_template, text_config

__all__ = ["FAMILIES"]

_MAX_POSITIONS = 32_768
_NAMED = {
    "unk_token": "<unk>",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "image_token": "<|IMAGE_PLACEHOLDER|>",
}
_SPECIAL_TOKENS = (*_NAMED.values(), "<|begin_of_sentence|>", "<|IMAGE_START|>", "<|IMAGE_END|>", "<|video_pad|>")
_CHAT_TEMPLATE = chat_template(
    {"image": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"},
    start="'<|begin_of_sentence|>'",
    turn="message.role | capitalize + ': '",
    end="(eos_token if message.role == 'assistant' else '\\n')",
    answer="'Assistant: '",
)


def _config(id_of: IdOf) -> Any:
    from transformers import PaddleOCRVLConfig

    return PaddleOCRVLConfig(
        architectures=["PaddleOCRVLForConditionalGeneration"],
        dtype="float32",
        tie_word_embeddings=False,
        image_token_id=id_of("<|IMAGE_PLACEHOLDER|>"),
        video_token_id=id_of("<|video_pad|>"),
        vision_start_token_id=id_of("<|IMAGE_START|>"),
        vision_end_token_id=id_of("<|IMAGE_END|>"),
        text_config=text_config(
            _MAX_POSITIONS,
            bos=id_of("<s>"),
            eos=id_of("</s>"),
            pad_token_id=id_of("<pad>"),
            head_dim=64,
            rms_norm_eps=NORM_EPSILON,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 5e5, "mrope_section": [8, 12, 12]},
        ),
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 112,
            "dtype": "float32",
        },
    )


def _processor(tokenizer: Any) -> Any:
    from transformers import PaddleOCRVLImageProcessor, PaddleOCRVLProcessor

    images = PaddleOCRVLImageProcessor(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1_024})
    return PaddleOCRVLProcessor(images, tokenizer, chat_template=_CHAT_TEMPLATE)


FAMILIES = (
    Declaration(
        family="paddleocr-vl",
        config=_config,
        shapes=weights.of_class("PaddleOCRVLForConditionalGeneration"),
        processor=_processor,
        special_tokens=_SPECIAL_TOKENS,
        named_tokens=_NAMED,
        end="</s>",
        pad="<pad>",
        chat_template=_CHAT_TEMPLATE,
        gains={
            "*.patch_embedding.weight": 2.0,
            "*.position_embedding.weight": 8.0,
            "*.visual.*.q_proj.weight": 1.5,
            "*.visual.*.k_proj.weight": 1.5,
            "*.projector.linear_1.weight": 2.0,
            "*.projector.linear_2.weight": 2.0,
        },
        published=prefixed(
            {
                "model.visual.": "visual.",
                "model.projector.": "mlp_AR.",
                "model.language_model.": "model.",
                "lm_head.": "lm_head.",
            }
        ),
        serving=Serving(max_items={"image": 4}),
    ),
)
