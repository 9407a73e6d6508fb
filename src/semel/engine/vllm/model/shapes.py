"""Shapes of the features that went into an engine, by digest.

An engine that holds an item goes by its digest alone, in its item cache and in its encoder cache. A second feature
under the same digest, well-formed but of another size, would be counted by its own layout and filled with the first
one's embeddings; that ends the engine. So its shape must be the same each time. What the digest stands for cannot be
checked (requirements D7): that is a frontend's and an injector's duty.
"""

from __future__ import annotations

from typing import Final

from semel.core import Digest, Feature, LruMap

__all__ = ["ShapeRegistry"]

_MAX_DIGESTS: Final = 1 << 18
"""More than any engine's caches hold; an entry takes about 200 bytes."""


class ShapeRegistry:
    """Remembers the shape of every feature that was shown, the latest of them."""

    def __init__(self, max_digests: int = _MAX_DIGESTS) -> None:
        self._shapes: LruMap[Digest, int] = LruMap(max_digests)

    def agrees(self, digest: Digest, feature: Feature) -> bool:
        """Return whether a digest is new or came with the same shape before; then it is remembered."""
        tensors = tuple((name, tensor.dtype, tensor.shape) for name, tensor in feature.tensors.items())
        shape = hash((feature.modality, feature.layout, tensors))
        if self._shapes.peek(digest) not in (None, shape):
            return False
        self._shapes.put(digest, shape)
        return True

    def refer(self, digest: Digest) -> None:
        """Keep a digest that came without its feature as long as one that came with it."""
        self._shapes.get(digest)

    def forget(self) -> None:
        """Forget all, when the engine does."""
        self._shapes.clear()
