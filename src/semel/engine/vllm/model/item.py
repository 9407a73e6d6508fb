"""One item as vLLM has it: made from a medium, written as tensors, and a stub of the medium to lay it out again.

vLLM calls a model's HF processor and cuts what it returns into items. An item is what the engine's cache holds and what
its encoder takes, so it is what a feature carries. The layout of an item follows from the item and from what vLLM sees
of its medium: sizes, lengths and times, never pixels. A stub has these and takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Final

from semel.core import Layout, Mask, Modality, Origin, Tensor
from semel.errors import ConfigError, FeatureRejected
from semel.processing import from_torch

__all__ = ["lay_out", "make_item", "make_items", "make_stub", "parse", "to_tensors"]

_MAX_SHAPES: Final[Mapping[Modality, tuple[int, ...]]] = {
    "image": (1 << 17, 1 << 17),
    "audio": (1 << 31,),
    "video": (1 << 16, 1 << 15, 1 << 15),
}
_MAX_SIZE: Final = 1 << 36  # the pixels of a video of 65,536 frames of 1024×1024


def parse(processor: Any, modality: Modality, medium: Any) -> Any:
    """Convert one medium to vLLM's items."""
    return processor.info.parse_mm_data({modality: [medium]})


def make_item(processor: Any, modality: Modality, items: Any, options: Mapping[str, object]) -> Any:
    """Return the item that vLLM's processor makes of the only medium."""
    (item,) = make_items(processor, modality, items, options)[modality]
    return item


def make_items(processor: Any, modality: Modality, items: Any, options: Mapping[str, object]) -> Any:
    """Return the items that vLLM's processor makes of media of one modality."""
    from vllm.multimodal.inputs import MultiModalKwargsItems

    output = processor._apply_hf_processor_main(items, options)
    configs = processor._get_mm_fields_config(output, options)
    own = {name: config for name, config in configs.items() if config.modality == modality and name in output}
    return MultiModalKwargsItems.from_hf_inputs(output, own)


def lay_out(
    processor: Any,
    modality: Modality,
    items: Any,
    item: Any,
    options: Mapping[str, object],
    part_of: Callable[[Any], slice],
) -> Layout:
    """Return what vLLM puts in the place of a prompt's only item; `part_of` tells which tokens are the item's own."""
    from vllm.multimodal.inputs import MultiModalKwargsItems

    made = item if isinstance(item, MultiModalKwargsItems) else MultiModalKwargsItems({modality: [item]})
    updates = processor._get_prompt_updates(items, options, made)
    content = next(update for update in updates if update.modality == modality).resolve(0).content
    part = part_of(content)
    mask = None if content.is_embed is None else Mask(content.is_embed(content.full)[part].tolist())
    return Layout(tuple(content.full[part]), None if mask is None or mask.count == len(mask) else mask)


def to_tensors(item: Any) -> Mapping[str, Tensor]:
    """Return an item's data by the names of its fields, which are sorted; a list of numbers becomes a tensor."""
    return {name: from_torch(_as_tensor(name, item[name].data)) for name in sorted(item)}


def make_stub(modality: Modality, origin: Origin) -> Any:
    """Return a medium with the shape of the original, without content and without memory."""
    import numpy as np

    limits = _MAX_SHAPES[modality]
    is_possible = len(origin.shape) == len(limits) and prod(origin.shape) <= _MAX_SIZE
    if not is_possible or not all(0 < side <= most for side, most in zip(origin.shape, limits, strict=True)):
        raise FeatureRejected(f"the {modality} feature is said to come from a medium of the shape {origin.shape}")
    if modality == "audio":
        return np.broadcast_to(np.float32(0), origin.shape)
    pixels = np.broadcast_to(np.uint8(0), (*origin.shape, 3))
    return pixels if origin.metadata is None else (pixels, dict(origin.metadata))


def _as_tensor(name: str, data: Any) -> Any:
    import torch

    if isinstance(data, torch.Tensor):
        return data
    if isinstance(data, int | float) or _is_numbers(data):
        return torch.tensor(data, dtype=torch.int64 if _are_whole(data) else torch.float64)
    raise ConfigError(
        f"the field {name} of an item is a {type(data).__name__}; semel carries tensors and lists of numbers"
    )


def _is_numbers(data: Any) -> bool:
    """Return whether a field's data is a list of numbers."""
    return isinstance(data, list | tuple) and all(isinstance(number, int | float) for number in data)


def _are_whole(data: Any) -> bool:
    return all(isinstance(number, int) for number in (data if isinstance(data, list | tuple) else (data,)))
