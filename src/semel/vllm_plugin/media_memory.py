"""Maps that the threads of vLLM's media loading share: what is known of an image, and decoded videos and clips."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import numpy as np

from semel.core.lru import LruMap

__all__ = ["DecodedMedia", "SharedMap"]

_V = TypeVar("_V")


class SharedMap(Generic[_V]):
    """The most recently used values by key, for several threads; bounded like `LruMap`."""

    def __init__(self, max_weight: int, weigh: Callable[[_V], int] = lambda _: 1) -> None:
        self._values: LruMap[Hashable, _V] = LruMap(max_weight, weigh)
        self._lock = threading.Lock()

    @property
    def max_weight(self) -> int:
        """The bound on the weight of all values."""
        return self._values.max_weight

    @property
    def weight(self) -> int:
        """The weight of all values."""
        return self._values.weight

    def get(self, key: Hashable) -> _V | None:
        """Return the value of a key, which becomes the most recently used."""
        with self._lock:
            return self._values.get(key)

    def put(self, key: Hashable, value: _V) -> None:
        """Store a value, unless it is over the bound by itself."""
        with self._lock:
            self._values.put(key, value)


class DecodedMedia:
    """Decoded videos and clips by their bytes and settings: an array, and what vLLM's loader says of it.

    Everybody gets a copy: a model's processor may write into what it is given.
    """

    def __init__(self, max_bytes: int) -> None:
        self._decoded: SharedMap[tuple[Any, Any]] = SharedMap(max_bytes, lambda decoded: int(decoded[0].nbytes))

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self._decoded.weight

    def load(self, key: Hashable, decode: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
        """Return the decoded media of a key. Frames on a GPU and arrays over the bound are decoded each time."""
        if (known := self._decoded.get(key)) is not None:
            return copy.deepcopy(known)
        decoded = decode()
        if isinstance(decoded[0], np.ndarray) and decoded[0].nbytes <= self._decoded.max_weight:
            self._decoded.put(key, copy.deepcopy(decoded))
        return decoded
