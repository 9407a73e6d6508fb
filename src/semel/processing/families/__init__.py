"""One small file for what is special about a model family, found by the `model_type` of its `config.json`.

To add a family whose HF processor tells its replacements: nothing. To teach semel a quirk: a subclass of `Family` in a
file here, and a line in the table below.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from semel.processing.families.family import Family
from semel.processing.families.gemma3 import Gemma3
from semel.processing.families.idefics3 import Idefics3
from semel.processing.families.llava import Llava
from semel.processing.families.qwen2_audio import Qwen2Audio
from semel.processing.families.qwen2_vl import Qwen2VL
from semel.processing.families.whisper import Whisper

__all__ = ["FAMILIES", "Family", "family_of"]

FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "gemma3": Gemma3(),
        "idefics3": Idefics3(),
        "llava": Llava(),
        "qwen2_5_vl": Qwen2VL(),
        "qwen2_audio": Qwen2Audio(),
        "qwen2_vl": Qwen2VL(),
        "whisper": Whisper(),
    }
)


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a model, from its `config.json`; one without quirks has the defaults."""
    family = FAMILIES.get(config.get("model_type", ""))
    return family if family is not None and family.describes(config) else Family()
