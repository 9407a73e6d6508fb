"""Screens as an agent sees them: windows, lines of text, an image. Pure: a function of the run's seed.

A PNG of one has 150 to 400 KB, as a screenshot of a desktop has.
"""

from __future__ import annotations

import io
import random
from dataclasses import dataclass
from typing import Final

from PIL import Image, ImageDraw, ImageFont

__all__ = ["HEIGHT", "WIDTH", "Screens"]

WIDTH: Final = 1_280
HEIGHT: Final = 720

_WINDOWS: Final = 4
_TITLE: Final = 22
_LINE: Final = 14
_PHOTO: Final = (360, 270)
_GRAIN: Final = 4  # pixels of the photo per pixel of noise
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
_COMPRESSION: Final = 6

_Box = tuple[int, int, int, int]


@dataclass(slots=True)
class Screens:
    """Draws screens, each different from all before. Another seed gives others."""

    seed: int
    drawn: int = 0

    def draw(self) -> bytes:
        """Return a new screen as PNG."""
        self.drawn += 1
        chance = random.Random(f"screen {self.seed}/{self.drawn}")
        screen = Image.new("RGB", (WIDTH, HEIGHT), _colour(chance, 60, 140))
        for _ in range(_WINDOWS):
            _draw_window(ImageDraw.Draw(screen), _box(chance, (520, 760), (300, 460)), chance)
        left, top, _, _ = _box(chance, (_PHOTO[0],) * 2, (_PHOTO[1],) * 2)
        screen.paste(_photo(chance), (left, top))
        buffer = io.BytesIO()
        screen.save(buffer, "PNG", compress_level=_COMPRESSION)
        return buffer.getvalue()


def _draw_window(drawing: ImageDraw.ImageDraw, box: _Box, chance: random.Random) -> None:
    left, top, right, bottom = box
    # Pillow's own bitmap font: the other one depends on how Pillow was built.
    font = ImageFont.load_default_imagefont()
    is_dark = chance.random() < 0.5
    paper, ink = (_colour(chance, 15, 45), 200) if is_dark else (_colour(chance, 235, 255), 30)
    drawing.rectangle(box, fill=paper, outline=(90, 90, 90))
    drawing.rectangle((left, top, right, top + _TITLE), fill=_colour(chance, 70, 200))
    drawing.text((left + 8, top + 5), _words(chance, 40), fill=(255, 255, 255), font=font)
    for line in range(top + _TITLE + 8, bottom - _LINE, _LINE):
        shade = (ink + chance.randrange(-25, 25), ink, ink + chance.randrange(-25, 25))
        length = chance.randrange(10, (right - left - 24) // 6)
        drawing.text((left + 12, line), _words(chance, length), fill=shade, font=font)


def _photo(chance: random.Random) -> Image.Image:
    width, height = (side // _GRAIN for side in _PHOTO)
    noise = Image.frombytes("RGB", (width, height), chance.randbytes(3 * width * height))
    return noise.resize(_PHOTO, Image.Resampling.BICUBIC)


def _box(chance: random.Random, widths: tuple[int, int], heights: tuple[int, int]) -> _Box:
    width, height = chance.randint(*widths), chance.randint(*heights)
    left, top = chance.randint(0, WIDTH - width), chance.randint(0, HEIGHT - height)
    return left, top, left + width, top + height


def _words(chance: random.Random, length: int) -> str:
    text = ""
    while len(text) < length:
        text += "".join(chance.choices(_LETTERS, k=chance.randint(1, 10))) + " "
    return text[:length]


def _colour(chance: random.Random, low: int, high: int) -> tuple[int, int, int]:
    return chance.randint(low, high), chance.randint(low, high), chance.randint(low, high)
