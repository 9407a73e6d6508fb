"""The files of a model folder, as a published model has them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from semel.lab.testing.models import weights

if TYPE_CHECKING:
    from semel.lab.testing.models.weights import Tensors

__all__ = ["write_folder"]


def write_folder(directory: Path, *, config: Any, generation: Any, processor: Any, tensors: Tensors | None) -> None:
    """Write all files of a model into `directory`, which exists.

    The part of `processor` that takes images or clips is written twice: the second copy is the
    `preprocessor_config.json` of published models. Where vLLM has the processor, `processor` is the tokenizer alone. A
    family that runs on no CPU has no tensors.
    """
    media = getattr(processor, "image_processor", None) or getattr(processor, "feature_extractor", None)
    for part in filter(None, (config, generation, processor, media)):
        part.save_pretrained(directory)
    if tensors is not None:
        weights.save(tensors, directory)
