"""Random weights of a tiny model: their shapes from the real class, their values from their names.

A value depends only on the family, the tensor's name and its position in the tensor. It does not depend on the order in
which a library creates its layers, nor on any global random state, which is neither read nor changed. Values are
uniform, so that drawing them is exact arithmetic and every machine gets the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Tensors: TypeAlias = dict[str, NDArray[np.float32]]

__all__ = ["Shapes", "fill", "of_class", "rename", "save"]

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

_BIAS_STD = 0.1
_SILENT_GAIN = 0.1


def fill(
    family: str,
    shapes: Shapes,
    gains: Mapping[str, float],
    *,
    head: str,
    tied: str | None = None,
    spoken: Sequence[int],
    end: int,
    end_gain: float,
) -> Tensors:
    """Tensors of these shapes, scaled by `gains`; the output head generates `spoken`.

    `head` names the tensor. `tied` names one that is left out because it equals the head. See `_draw` and `_quieten`.
    """
    tensors = _draw(family, {name: shape for name, shape in shapes.items() if name != tied}, gains)
    _quieten(tensors[head], spoken=spoken, end=end, end_gain=end_gain)
    return tensors


def of_class(name: str) -> Callable[[Any], Shapes]:
    """Return how the tensors of a configuration are found: as those of a class of transformers."""

    def shapes(config: Any) -> Shapes:
        import transformers

        return _shapes(lambda: getattr(transformers, name)(config))

    return shapes


def _shapes(create: Callable[[], Any]) -> Shapes:
    """Name and shape of every tensor of the model that `create` returns; it is created without memory for weights."""
    import torch

    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in create().state_dict().items()}


def _draw(family: str, shapes: Shapes, gains: Mapping[str, float]) -> Tensors:
    """Values for `shapes`, such that inputs of unit variance come out of a matrix with variance gain².

    `gains` maps a shell-style pattern of names to the gain of the tensors that match it. The first match counts;
    without a match the gain is 1.
    """
    return {name: _tensor(f"{family}/{name}", shape, _gain(name, gains)) for name, shape in shapes.items()}


def _quieten(head: NDArray[np.float32], *, spoken: Sequence[int], end: int, end_gain: float) -> None:
    """Scale the rows of an output head, in place, so that greedy text is printable and seldom ends early.

    The smaller `end_gain`, the longer the texts.
    """
    silent = sorted(set(range(len(head))) - {*spoken, end})
    head[silent] *= head.dtype.type(_SILENT_GAIN)
    head[end] *= head.dtype.type(end_gain)


def rename(tensors: Tensors, prefixes: Mapping[str, str]) -> Tensors:
    """Return the tensors under other names: the first matching prefix is replaced, and each name must have one."""

    def renamed(name: str) -> str:
        old = next(prefix for prefix in prefixes if name.startswith(prefix))
        return prefixes[old] + name.removeprefix(old)

    return {renamed(name): tensor for name, tensor in tensors.items()}


def save(tensors: Tensors, directory: Path) -> None:
    """Write `model.safetensors`."""
    from safetensors.numpy import save_file

    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _gain(name: str, gains: Mapping[str, float]) -> float:
    return next((gain for pattern, gain in gains.items() if fnmatchcase(name, pattern)), 1.0)


def _tensor(seed: str, shape: tuple[int, ...], gain: float) -> NDArray[np.float32]:
    import numpy as np

    if seed.endswith(".bias"):
        return _uniform(seed, shape, _BIAS_STD * gain)
    if len(shape) == 1:  # the scale of a norm
        return np.full(shape, gain, dtype=np.float32)
    if "embed_" in seed.rsplit(".", 2)[-2]:
        return _uniform(seed, shape, gain)
    return _uniform(seed, shape, gain / math.sqrt(math.prod(shape[1:])))


def _uniform(seed: str, shape: tuple[int, ...], std: float) -> NDArray[np.float32]:
    import numpy as np

    generator = np.random.Generator(np.random.PCG64(list(seed.encode())))
    values = generator.random(shape, dtype=np.float32).astype(np.float64)
    # A matrix or a filter over time ignores the level that all its inputs share (the mean of a GELU, the loudness of a
    # clip), which would otherwise hide the differences. A filter over pixels does not: a grey image is nothing but
    # level. Sums of 24-bit fractions are exact in float64, hence the same on every machine.
    centre = values.mean(axis=tuple(range(1, len(shape))), keepdims=True) if len(shape) in (2, 3) else 0.5
    return ((values - centre) * (math.sqrt(12) * std)).astype(np.float32)
