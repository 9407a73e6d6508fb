"""One item as vLLM has it: made from a medium, written as tensors, and a stub of the medium to lay it out again.

vLLM calls a model's HF processor and cuts what it returns into items. An item is what the engine's cache holds and what
its encoder takes, so it is what a feature carries. The layout of an item follows from the item and from what vLLM sees
of its medium: sizes, lengths and times, never pixels. A stub has these and takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Final

from semel.core import Layout, Mask, Modality, Origin, Tensor
from semel.errors import ConfigError, FeatureRejected
from semel.processing import from_torch

if TYPE_CHECKING:
    import torch

__all__ = [
    "has_tensors",
    "lay_out",
    "make_item",
    "make_items",
    "make_stub",
    "parse",
    "shapes_name",
    "to_tensors",
    "unpack",
]

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
    """Return an item's data by the names of its fields, which are sorted.

    Numbers become a tensor. Several tensors, as the slices of an image, become two: their elements and their shapes.
    """
    tensors: dict[str, Tensor] = {}
    for name in sorted(item):
        if has_tensors(data := item[name].data):
            tensors |= _pack(name, data)
        else:
            tensors[name] = from_torch(_as_tensor(name, data))
    return tensors


def has_tensors(data: Any) -> bool:
    """Return whether a field's data is several tensors."""
    import torch

    return isinstance(data, list | tuple) and bool(data) and all(isinstance(one, torch.Tensor) for one in data)


def shapes_name(name: str) -> str:
    """Return the name under which the shapes of a field's several tensors travel."""
    return f"{name}.shapes"


def unpack(name: str, elements: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return the tensors of these shapes, as views of all their elements; the reverse of what `to_tensors` does."""
    sizes = [prod(shape) for shape in shapes]
    if not sizes or any(side < 0 for shape in shapes for side in shape) or sum(sizes) != elements.numel():
        raise FeatureRejected(f"{name} has {elements.numel():,} elements, and its shapes are {str(shapes)[:200]}")
    return [part.reshape(tuple(shape)) for part, shape in zip(elements.split(sizes), shapes, strict=True)]


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


def _pack(name: str, data: Sequence[torch.Tensor]) -> Mapping[str, Tensor]:
    import torch

    kinds = {(one.dtype, one.ndim) for one in data}
    if len(kinds) > 1:
        raise ConfigError(f"the tensors in the field {name} of an item differ in dtype or rank: {kinds}")
    elements = torch.cat([one.reshape(-1) for one in data])
    shapes = torch.tensor([tuple(one.shape) for one in data], dtype=torch.int64)
    return {name: from_torch(elements), shapes_name(name): from_torch(shapes)}


def _as_tensor(name: str, data: Any) -> torch.Tensor:
    import torch

    if isinstance(data, torch.Tensor):
        return data
    if (numbers := _numbers(data)) is not None:
        is_whole = all(isinstance(number, int) for number in numbers)
        try:
            return torch.tensor(data, dtype=torch.int64 if is_whole else torch.float64)
        except ValueError as error:  # rows of different lengths
            raise ConfigError(f"the field {name} of an item cannot be carried: {error}") from None
    raise ConfigError(
        f"the field {name} of an item is a {type(data).__name__}; semel carries tensors, lists of them, and numbers"
    )


def _numbers(data: Any) -> list[int | float] | None:
    """Return all numbers of a field's data, in lists of lists at most; None if it has anything else."""
    if isinstance(data, int | float):
        return [data]
    if not isinstance(data, list | tuple):
        return None
    found: list[int | float] = []
    for one in data:
        if (numbers := _numbers(one)) is None:
            return None
        found += numbers
    return found
