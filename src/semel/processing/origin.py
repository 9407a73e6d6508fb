"""What is known of a decoded medium besides its content."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semel.core import Modality, Origin

__all__ = ["origin_of"]


def origin_of(
    modality: Modality, decoded: Any, options: Mapping[str, object], metadata: Mapping[str, Any] | None = None
) -> Origin:
    """The origin of an image of Pillow's, of samples, or of the frames of a video with their metadata."""
    if modality == "image":
        width, height = decoded.size
        shape: tuple[int, ...] = (height, width)
    else:
        shape = tuple(decoded.shape[:3])
    return Origin(shape, None if metadata is None else dict(metadata), dict(options) or None)
