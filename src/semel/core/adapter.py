"""A LoRA adapter: weights that an engine adds to its model's own for the requests that name it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["MAX_ADAPTER_NAME_CHARS", "Adapter"]

MAX_ADAPTER_NAME_CHARS: Final = 128


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that a worker has loaded."""

    name: str
    """The `model` of the requests that it answers."""

    root: str
    """The folder or hub name that it was loaded from."""

    content: str
    """A hash of its files: the same name may be loaded again with other weights."""

    parent: str
    """The name of the model that it is for."""
