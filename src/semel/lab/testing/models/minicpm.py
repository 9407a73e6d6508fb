"""A tiny model of MiniCPM-V 4.5: an image whole and in slices, a video frame by frame, each a tensor of its own width.

Its configuration and its image processor come with the model (`--trust-remote-code`), vLLM has the rest. The published
image processor is on the hub only; the one here cuts by transformers' class of MiniCPM-V 4.6, which has the same grids,
and returns what vLLM reads of the older one. An image has its number among its tokens, so that a prompt takes only one.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from semel.lab.testing.models import weights
from semel.lab.testing.models.declaration import Declaration, IdOf, JsonConfig, Serving
from semel.lab.testing.models.text import CHATML, HIDDEN_SIZE, NORM_EPSILON, chat_template, text_config

if TYPE_CHECKING:
    from semel.lab.testing.models.weights import Shapes

__all__ = ["FAMILIES"]

_MAX_POSITIONS = 32_768
_SLICE_SIDE = 112
_PATCH_SIDE = 14
_MAX_SLICES = 4
_QUERIES = 16
_TOWER_SIZE = 64
_TOWER_LAYERS = 2

_NAMED = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": "<unk>"}
_TOKENS = ("<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>")
_PROCESSOR = {
    "auto_map": {
        "AutoImageProcessor": "image_processing_minicpmv.MiniCPMVImageProcessor",
        "AutoProcessor": "processing_minicpmv.MiniCPMVProcessor",
    },
    "image_processor_type": "MiniCPMVImageProcessor",
    "processor_class": "MiniCPMVProcessor",
    "image_feature_size": _QUERIES,
    "max_slice_nums": _MAX_SLICES,
    "patch_size": _PATCH_SIDE,
    "scale_resolution": _SLICE_SIDE,
}
_CONFIGURATION = '''\
"""The configuration of MiniCPM-V 4.5."""

from transformers import Qwen3Config, SiglipVisionConfig


class MiniCPMVConfig(Qwen3Config):
    model_type = "minicpmv"

    def __init__(self, vision_config=None, **kwargs):
        super().__init__(**kwargs)
        self.vision_config = SiglipVisionConfig(**(vision_config or {}))
'''
_PROCESSING = '''\
"""The processor of MiniCPM-V 4.5, as vLLM has it."""

from vllm.transformers_utils.processors.minicpmv import MiniCPMVProcessor
'''
_IMAGE_PROCESSING = '''\
"""The image processor of MiniCPM-V 4.5: of each image the whole and its slices, each a tensor of its own."""

import torch
from transformers import BatchFeature, MiniCPMV4_6ImageProcessor


class MiniCPMVImageProcessor(MiniCPMV4_6ImageProcessor):
    im_id_start = "<image_id>"
    im_id_end = "</image_id>"
    image_feature_size = 64

    def get_sliced_grid(self, image_size, max_slice_nums, scale_resolution=None):
        if scale_resolution is not None:  # the class above: rows and columns of (height, width)
            return super().get_sliced_grid(image_size, max_slice_nums, scale_resolution)
        width, height = image_size
        grid = super().get_sliced_grid((height, width), max_slice_nums, self.scale_resolution)
        return grid and grid[::-1]

    def get_slice_image_placeholder(self, image_size, image_idx=0, max_slice_nums=None, use_image_id=True):
        features = "<unk>" * self.image_feature_size
        columns, rows = self.get_sliced_grid(image_size, max_slice_nums or self.max_slice_nums) or (0, 0)
        mark = f"<image_id>{image_idx}</image_id>" if use_image_id else ""
        return mark + f"<image>{features}</image>" + "\\n".join([f"<slice>{features}</slice>" * columns] * rows)

    def preprocess(self, images, do_pad=True, return_tensors=None, **kwargs):
        made = [[self.slices(image) for image in own] for own in images]
        return BatchFeature(
            {
                "pixel_values": [[one for pixels, _, _ in own for one in pixels] for own in made],
                "image_sizes": [[size for _, size, _ in own] for own in made],
                "tgt_sizes": [torch.vstack([grids for _, _, grids in own]) for own in made],
            }
        )

    def slices(self, image):
        made = super().preprocess([image], return_tensors="pt")
        grids = made["target_sizes"].to(torch.int32)
        widths = (grids.prod(-1) * self.patch_size).tolist()
        size = image.shape[1::-1] if hasattr(image, "shape") else image.size  # frames are arrays
        return made["pixel_values"][0].split(widths, dim=-1), size, grids
'''


def _config(id_of: IdOf) -> Any:
    text = text_config(
        _MAX_POSITIONS,
        bos=id_of("<|im_start|>"),
        eos=id_of("<|im_end|>"),
        head_dim=64,
        rms_norm_eps=NORM_EPSILON,
        tie_word_embeddings=False,
    )
    return JsonConfig(
        {
            **text,
            "architectures": ["MiniCPMV"],
            "auto_map": {"AutoConfig": "configuration_minicpm.MiniCPMVConfig"},
            "model_type": "minicpmv",
            "version": 4.5,
            "query_num": _QUERIES,
            "image_size": _SLICE_SIDE,
            "max_slice_num": _MAX_SLICES,
            "drop_vision_last_layer": False,
            "vision_config": {
                "hidden_size": _TOWER_SIZE,
                "intermediate_size": 2 * _TOWER_SIZE,
                "num_hidden_layers": _TOWER_LAYERS,
                "num_attention_heads": 2,
                "image_size": _SLICE_SIDE,
                "patch_size": _PATCH_SIDE,
            },
        }
    )


def _shapes(config: JsonConfig) -> Shapes:
    """Return the tensors of the published checkpoints: transformers has no class for them, but for the text model."""
    from transformers import Qwen3Config

    size, wide = _TOWER_SIZE, HIDDEN_SIZE
    shapes: dict[str, tuple[int, ...]] = {
        **_linear("vpm.embeddings.patch_embedding", size, 3, _PATCH_SIDE, _PATCH_SIDE),
        "vpm.embeddings.position_embedding.weight": ((_SLICE_SIDE // _PATCH_SIDE) ** 2, size),
        **_linear("vpm.post_layernorm", size),
        "resampler.query": (_QUERIES, wide),
        "resampler.proj": (wide, wide),
        "resampler.kv_proj.weight": (wide, size),
        "resampler.attn.in_proj_weight": (3 * wide, wide),
        "resampler.attn.in_proj_bias": (3 * wide,),
        **_linear("resampler.attn.out_proj", wide, wide),
    }
    for norm in ("ln_q", "ln_kv", "ln_post"):
        shapes |= _linear(f"resampler.{norm}", wide)
    for layer in range(_TOWER_LAYERS):
        name = f"vpm.encoder.layers.{layer}."
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _linear(f"{name}self_attn.{part}", size, size)
        shapes |= {
            **_linear(name + "layer_norm1", size),
            **_linear(name + "layer_norm2", size),
            **_linear(name + "mlp.fc1", 2 * size, size),
            **_linear(name + "mlp.fc2", size, 2 * size),
        }
    values = {name: value for name, value in config.values.items() if name not in ("model_type", "vision_config")}
    text = weights.of_class("Qwen3ForCausalLM")(Qwen3Config(**values))
    return shapes | {f"llm.{name}": shape for name, shape in text.items()}


def _linear(name: str, *shape: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


FAMILIES = (
    Declaration(
        family="minicpm-v",
        config=_config,
        shapes=_shapes,
        processor=lambda _: None,
        special_tokens=(*_NAMED.values(), *_TOKENS),
        named_tokens=_NAMED,
        end="<|im_end|>",
        pad="<|endoftext|>",
        chat_template=chat_template({"image": "(<image>./</image>)\n", "video": "(<video>./</video>)\n"}, **CHATML),
        gains={
            "vpm.embeddings.p*.weight": 2.0,
            "vpm.*.q_proj.weight": 1.5,
            "vpm.*.k_proj.weight": 1.5,
            "resampler.*.in_proj_weight": 2.0,
            "resampler.*.in_proj_bias": 0.1,
            "resampler.proj": 2.0,
            "llm.lm_head.weight": 3.0,
        },
        head="llm.lm_head.weight",
        files={
            "preprocessor_config.json": json.dumps(_PROCESSOR, indent=2) + "\n",
            "configuration_minicpm.py": _CONFIGURATION,
            "image_processing_minicpmv.py": _IMAGE_PROCESSING,
            "processing_minicpmv.py": _PROCESSING,
        },
        serving=Serving(max_items={"image": 1, "video": 2}, flags=("--trust-remote-code",)),
    ),
)
