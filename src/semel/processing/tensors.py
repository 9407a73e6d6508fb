"""Between torch's tensors and ours, without a copy in either direction."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from semel.core import Tensor

if TYPE_CHECKING:
    import torch

__all__ = ["from_torch", "is_out_of_memory", "to_torch"]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether torch has failed to allocate, which it says in no other way than by this text."""
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


def from_torch(tensor: torch.Tensor) -> Tensor:
    """Return the same bytes as a tensor of ours; one that is not contiguous is made so, which copies."""
    import torch

    dense = tensor.detach().contiguous()
    flat = dense.reshape(-1).view(torch.uint8)
    return Tensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), memoryview(flat.numpy()))


def to_torch(tensor: Tensor) -> torch.Tensor:
    """Return the same bytes as a torch tensor. They must not be written to: features are immutable."""
    import torch

    dtype: torch.dtype = getattr(torch, tensor.dtype)
    if not tensor.nbytes:
        return torch.empty(tensor.shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(tensor.data, dtype=dtype).reshape(tensor.shape)
