"""Images of random sizes, from small squares to strips, as clients send them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Final

import numpy as np
from PIL import Image

__all__ = ["image_of", "random_sizes"]

_CORNERS: Final = ((28, 28), (4096, 64), (64, 4096), (640, 480), (1920, 1080), (28, 280))
_MIN_SIDE, _MAX_SIDE = 28, 4096
_MAX_PIXELS: Final = 4096 * 64


def random_sizes(count: int, seed: int = 0) -> Iterator[tuple[int, int]]:
    """Widths and heights: those that are special, and random ones of at most as many pixels as a strip of 4096×64."""
    rng = np.random.default_rng(seed)
    yield from _CORNERS[:count]
    for _ in range(count - len(_CORNERS)):
        width = int(np.exp(rng.uniform(np.log(_MIN_SIDE), np.log(_MAX_SIDE))))
        height = int(np.exp(rng.uniform(np.log(_MIN_SIDE), np.log(max(_MIN_SIDE + 1, _MAX_PIXELS // width)))))
        yield (width, height) if rng.random() < 0.5 else (height, width)


def image_of(width: int, height: int) -> bytes:
    """A PNG of this size, small to send, and like no other size's."""
    ramp = np.add.outer(np.arange(height) * 3, np.arange(width) * 5).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(np.stack([ramp, ramp[::-1], ramp[:, ::-1]], axis=-1)).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
