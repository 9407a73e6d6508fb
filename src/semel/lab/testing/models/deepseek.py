"""DeepSeek-VL2 without weights: vLLM has its processor, and its tower is one of timm's, of one size that is not tiny.

Its tiles depend on how many images a prompt has: more than two are not tiled.
"""

from __future__ import annotations

from typing import Any

from semel.lab.testing.models.declaration import Declaration, IdOf, JsonConfig, Serving
from semel.lab.testing.models.text import HIDDEN_SIZE, VOCABULARY_TOKENS, chat_template

__all__ = ["FAMILIES"]

_SIDE = 84
_NAMED = {
    "bos_token": "<｜begin▁of▁sentence｜>",
    "eos_token": "<｜end▁of▁sentence｜>",
    "pad_token": "<｜▁pad▁｜>",
}
_SPECIAL_TOKENS = (
    *_NAMED.values(),
    *("<image>", "<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>", "<|grounding|>", "<|User|>", "<|Assistant|>"),
)
_CHAT_TEMPLATE = chat_template(
    {"image": "<image>\n"},
    start="bos_token",
    turn="('<|Assistant|>: ' if message.role == 'assistant' else '<|User|>: ')",
    end="(eos_token if message.role == 'assistant' else '\\n\\n')",
    answer="'<|Assistant|>:'",
)


def _config(id_of: IdOf) -> Any:
    text = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": VOCABULARY_TOKENS,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 2 * HIDDEN_SIZE,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "first_k_dense_replace": 2,
        "bos_token_id": id_of(_NAMED["bos_token"]),
        "eos_token_id": id_of(_NAMED["eos_token"]),
    }
    return JsonConfig(
        {
            "architectures": ["DeepseekVLV2ForCausalLM"],
            "model_type": "deepseek_vl_v2",
            "dtype": "float32",
            "candidate_resolutions": [
                [_SIDE * width, _SIDE * height] for width, height in ((1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (3, 1))
            ],
            "global_view_pos": "head",
            "tile_tag": "2D",
            "language_config": text,
            "vision_config": {"model_type": "vision", "image_size": _SIDE, "patch_size": 14, "width": 64, "layers": 2},
            "projector_config": {"model_type": "mlp_projector", "input_dim": 64, "n_embed": HIDDEN_SIZE},
        }
    )


_PROCESSOR = """\
{
  "candidate_resolutions": [[84, 84], [84, 168], [168, 84], [168, 168], [84, 252], [252, 84]],
  "downsample_ratio": 2,
  "image_mean": [0.5, 0.5, 0.5],
  "image_std": [0.5, 0.5, 0.5],
  "image_token": "<image>",
  "normalize": true,
  "patch_size": 14,
  "processor_class": "DeepseekVLV2Processor"
}
"""

FAMILIES = (
    Declaration(
        family="deepseek-vl2",
        config=_config,
        shapes=None,
        processor=lambda _: None,
        special_tokens=_SPECIAL_TOKENS,
        named_tokens=_NAMED,
        end=_NAMED["eos_token"],
        pad=_NAMED["pad_token"],
        chat_template=_CHAT_TEMPLATE,
        files={"processor_config.json": _PROCESSOR, "preprocessor_config.json": _PROCESSOR},
        serving=Serving(max_items={"image": 2}, level="processor"),
    ),
)
