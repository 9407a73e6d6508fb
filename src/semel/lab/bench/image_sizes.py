"""Sizes of images as users send them, and the tokens that Qwen2-VL makes of them.

Half are common sizes of screens, cameras and squares, half are any size from 200 to 2,000 pixels.
"""

from __future__ import annotations

from math import sqrt
from random import Random
from typing import Final

__all__ = ["draw_size", "tokens_of"]

_PATCH: Final = 28
_MAX_PIXELS: Final = 12_845_056
_COMMON: Final = (
    (1920, 1080),
    (1280, 720),
    (2560, 1440),
    (1440, 900),
    (1366, 768),
    (1170, 2532),
    (1080, 2400),
    (4032, 3024),
    (3024, 4032),
    (1600, 1200),
    (640, 480),
    (1024, 768),
    (1024, 1024),
    (768, 768),
    (512, 512),
    (336, 336),
)


def draw_size(random: Random) -> tuple[int, int]:
    """Return the width and height of an image."""
    common, any_size = random.choice(_COMMON), (random.randint(200, 2_000), random.randint(200, 2_000))
    return common if random.random() < 0.5 else any_size


def tokens_of(width: int, height: int) -> int:
    """Return the tokens of an image."""
    shrink = max(1.0, sqrt(width * height / _MAX_PIXELS))
    return max(1, round(width / shrink / _PATCH)) * max(1, round(height / shrink / _PATCH))
