"""Tiny models of InternVL: an image in tiles of a fixed number of tokens, and the whole of it; videos frame by frame.

There are two formats. `internvl` is the one of transformers. `internvl-chat` is the original: its configuration class
comes with the model (`--trust-remote-code`), vLLM has the processor, and `<image>` is no token of its vocabulary: the
placeholder in a prompt is several tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from semel.lab.testing.models import weights
from semel.lab.testing.models.declaration import Declaration, IdOf, JsonConfig, Serving, prefixed
from semel.lab.testing.models.text import CHATML, HIDDEN_SIZE, NORM_EPSILON, chat_template, text_config

if TYPE_CHECKING:
    from semel.lab.testing.models.weights import Shapes

__all__ = ["FAMILIES"]

_MAX_POSITIONS = 32_768
_TILE_SIDE = 56
_PATCH_SIDE = 14
_TILE_TOKENS = (_TILE_SIDE // _PATCH_SIDE // 2) ** 2
_MAX_TILES = 6
_TOWER_SIZE = 128
_TOWER_LAYERS = 2

_NAMED = {
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
_CHAT_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<|video_pad|>")
_TOWER_GAINS = {
    "*.patch_embedding*.weight": 2.0,
    "*.position_embedding*": 20.0,
    "*.vision_tower.*.q_proj.weight": 1.5,
    "*.vision_tower.*.k_proj.weight": 1.5,
    "*.attn.qkv.weight": 1.5,
    "*.linear_1.weight": 2.0,
    "*.linear_2.weight": 2.0,
    "mlp1.1.weight": 2.0,
    "mlp1.3.weight": 2.0,
}
_TEMPLATE = chat_template({"image": "<IMG_CONTEXT>\n", "video": "<video>\n"}, **CHATML)
_CHAT_TEMPLATE = chat_template({"image": "<image>\n", "video": "<video>\n"}, **CHATML)


def _text(id_of: IdOf) -> dict[str, Any]:
    return text_config(
        _MAX_POSITIONS,
        bos=id_of("<|endoftext|>"),
        eos=id_of("<|im_end|>"),
        model_type="qwen2",
        rms_norm_eps=NORM_EPSILON,
        tie_word_embeddings=False,
    )


def _config(id_of: IdOf) -> Any:
    from transformers import InternVLConfig

    return InternVLConfig(
        architectures=["InternVLForConditionalGeneration"],
        dtype="float32",
        tie_word_embeddings=False,
        image_token_id=id_of("<IMG_CONTEXT>"),
        image_seq_length=_TILE_TOKENS,
        text_config=_text(id_of),
        vision_config={
            "hidden_size": _TOWER_SIZE,
            "intermediate_size": 2 * _TOWER_SIZE,
            "num_hidden_layers": _TOWER_LAYERS,
            "num_attention_heads": 2,
            "attention_bias": True,
            "image_size": [_TILE_SIDE, _TILE_SIDE],
            "patch_size": [_PATCH_SIDE, _PATCH_SIDE],
            "dtype": "float32",
        },
    )


def _processor(tokenizer: Any) -> Any:
    from transformers import GotOcr2ImageProcessor, InternVLProcessor, InternVLVideoProcessor

    size = {"height": _TILE_SIDE, "width": _TILE_SIDE}
    images = GotOcr2ImageProcessor(size=dict(size), crop_to_patches=True, min_patches=1, max_patches=_MAX_TILES)
    videos = InternVLVideoProcessor(size=dict(size))
    return InternVLProcessor(
        images, tokenizer, videos, image_seq_length=_TILE_TOKENS, chat_template=tokenizer.chat_template
    )


def _original_config(id_of: IdOf) -> Any:
    tower = {
        "architectures": ["InternVisionModel"],
        "model_type": "intern_vit_6b",
        "hidden_size": _TOWER_SIZE,
        "intermediate_size": 2 * _TOWER_SIZE,
        "num_hidden_layers": _TOWER_LAYERS,
        "num_attention_heads": 2,
        "image_size": _TILE_SIDE,
        "patch_size": _PATCH_SIDE,
        "hidden_act": "gelu",
        "norm_type": "layer_norm",
        "layer_norm_eps": 1e-6,
        "qkv_bias": True,
        "qk_normalization": False,
        "initializer_factor": 0.1,
    }
    return JsonConfig(
        {
            "architectures": ["InternVLChatModel"],
            "auto_map": {"AutoConfig": "configuration_internvl_chat.InternVLChatConfig"},
            "model_type": "internvl_chat",
            "dtype": "float32",
            "llm_config": {**_text(id_of), "architectures": ["Qwen2ForCausalLM"]},
            "vision_config": tower,
            "force_image_size": _TILE_SIDE,
            "downsample_ratio": 0.5,
            "ps_version": "v2",
            "select_layer": -1,
            "dynamic_image_size": True,
            "min_dynamic_patch": 1,
            "max_dynamic_patch": _MAX_TILES,
            "use_thumbnail": True,
            "tie_word_embeddings": False,
        }
    )


_CONFIGURATION = '''\
"""The configuration of InternVL in its original format."""

from transformers import PretrainedConfig, Qwen2Config


class InternVisionConfig(PretrainedConfig):
    model_type = "intern_vit_6b"


class InternVLChatConfig(PretrainedConfig):
    model_type = "internvl_chat"
    is_composition = True

    def __init__(self, vision_config=None, llm_config=None, **kwargs):
        self.vision_config = InternVisionConfig(**(vision_config or {}))
        self.llm_config = Qwen2Config(**(llm_config or {}))
        super().__init__(**kwargs)

    def to_dict(self):
        parts = {"vision_config": self.vision_config.to_dict(), "llm_config": self.llm_config.to_dict()}
        return {**super().to_dict(), **parts, "model_type": self.model_type}
'''


def _original_shapes(config: JsonConfig) -> Shapes:
    """Return the tensors of the original checkpoints: transformers has no class for them, but for the text model."""
    from transformers import Qwen2Config

    size = _TOWER_SIZE
    shapes: dict[str, tuple[int, ...]] = {
        "vision_model.embeddings.class_embedding": (1, 1, size),
        "vision_model.embeddings.position_embedding": (1, (_TILE_SIDE // _PATCH_SIDE) ** 2 + 1, size),
        **_linear("vision_model.embeddings.patch_embedding", size, 3, _PATCH_SIDE, _PATCH_SIDE),
        **_linear("mlp1.0", 4 * size),
        **_linear("mlp1.1", HIDDEN_SIZE, 4 * size),
        **_linear("mlp1.3", HIDDEN_SIZE, HIDDEN_SIZE),
    }
    for layer in range(_TOWER_LAYERS):
        name = f"vision_model.encoder.layers.{layer}."
        shapes |= {
            **{name + scale: (size,) for scale in ("ls1", "ls2")},
            **_linear(name + "norm1", size),
            **_linear(name + "norm2", size),
            **_linear(name + "attn.qkv", 3 * size, size),
            **_linear(name + "attn.proj", size, size),
            **_linear(name + "mlp.fc1", 2 * size, size),
            **_linear(name + "mlp.fc2", size, 2 * size),
        }
    text = weights.of_class("Qwen2ForCausalLM")(Qwen2Config(**config.values["llm_config"]))
    return shapes | {f"language_model.{name}": shape for name, shape in text.items()}


def _linear(name: str, *shape: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


FAMILIES = (
    Declaration(
        family="internvl",
        config=_config,
        shapes=weights.of_class("InternVLForConditionalGeneration"),
        processor=_processor,
        special_tokens=(*_NAMED.values(), "<|im_start|>"),
        named_tokens=_NAMED,
        end="<|im_end|>",
        pad="<|endoftext|>",
        chat_template=_TEMPLATE,
        gains=_TOWER_GAINS,
        published=prefixed(
            {
                "model.vision_tower.": "vision_tower.",
                "model.multi_modal_projector.": "multi_modal_projector.",
                "model.language_model.": "language_model.model.",
                "lm_head.": "language_model.lm_head.",
            }
        ),
        serving=Serving(max_items={"image": 4, "video": 2}),
    ),
    Declaration(
        family="internvl-chat",
        config=_original_config,
        shapes=_original_shapes,
        processor=lambda _: None,
        special_tokens=_CHAT_TOKENS,
        end="<|im_end|>",
        pad="<|endoftext|>",
        chat_template=_CHAT_TEMPLATE,
        gains={**_TOWER_GAINS, "language_model.lm_head.weight": 3.0},
        head="language_model.lm_head.weight",
        files={"configuration_internvl_chat.py": _CONFIGURATION},
        serving=Serving(max_items={"image": 4, "video": 2}, flags=("--trust-remote-code",)),
    ),
)
