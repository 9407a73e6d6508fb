"""The language model of the tiny families: two layers of 128 channels over 1,024 tokens.

This part is the same in all of them. A family adds its tower and its special tokens, and the differences of its text
model. Whisper, whose decoder is of another kind, uses nothing from here.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

__all__ = ["END_GAIN", "GAINS", "HIDDEN_SIZE", "NORM_EPSILON", "VOCABULARY_TOKENS", "text_config"]

VOCABULARY_TOKENS = 1024
HIDDEN_SIZE = 128

GAINS = MappingProxyType(
    {
        "*.embed_tokens.weight": 0.3,
        "*.q_proj.weight": 2.2,
        "*.k_proj.weight": 2.2,
        "*.v_proj.weight": 2.0,
        "*.o_proj.weight": 2.0,
        "*.gate_proj.weight": 2.0,
        "*.up_proj.weight": 2.0,
        "*.down_proj.weight": 2.0,
        "lm_head.weight": 3.0,
    }
)
END_GAIN = 0.9
# Not negligible next to the variance of a token embedding: the first norm dampens text, so that the larger items stand
# out.
NORM_EPSILON = 0.1


def text_config(max_positions: int, *, bos: int, eos: int, **own: Any) -> dict[str, Any]:
    """Return the `text_config` of a family; `own` has the values of that family only."""
    return {
        "vocab_size": VOCABULARY_TOKENS,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 2 * HIDDEN_SIZE,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": max_positions,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "dtype": "float32",
        **own,
    }
