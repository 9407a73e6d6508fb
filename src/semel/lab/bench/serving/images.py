"""Images that are new to every server, and the requests with them. Pure: a function of the run's seed."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pybase64
from PIL import Image

__all__ = ["Images", "Size", "chat", "image_part", "media_part", "text_part"]

_CELL = 1_024 / 88  # pixels of the image per pixel of noise: a JPEG of 1024×1024 has about 260 KB
_QUALITY = 90


class Size(Enum):
    """The size of an image: width and height."""

    SMALL = (112, 112)
    MEDIUM = (448, 448)
    SQUARE = (1_024, 1_024)
    HD = (1_920, 1_080)


@dataclass(slots=True)
class Images:
    """Draws images, each different from all before. Another seed gives others, so a server can be reused."""

    seed: int
    drawn: int = 0

    def draw(self, size: Size) -> bytes:
        """Return a new image as JPEG."""
        self.drawn += 1
        width, height = size.value
        noise = (round(width / _CELL), round(height / _CELL))
        data = random.Random(f"{self.seed}/{self.drawn}").randbytes(3 * noise[0] * noise[1])
        image = Image.frombytes("RGB", noise, data).resize((width, height), Image.Resampling.BICUBIC)
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=_QUALITY)
        return buffer.getvalue()


def image_part(data: bytes, kind: str = "jpeg") -> dict[str, Any]:
    """Return an image as part of a message."""
    return media_part("image", data, kind)


def media_part(modality: str, data: bytes, kind: str) -> dict[str, Any]:
    """Return a medium as part of a message."""
    url = f"data:{modality}/{kind};base64,{pybase64.b64encode(data).decode()}"
    return {"type": f"{modality}_url", f"{modality}_url": {"url": url}}


def text_part(text: str) -> dict[str, Any]:
    """Return a text as part of a message."""
    return {"type": "text", "text": text}


def chat(*contents: Sequence[dict[str, Any]] | str, **fields: object) -> bytes:
    """Return a request with these messages; roles alternate, and the user's message is the first."""
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]
    return json.dumps({"messages": messages, "temperature": 0.0, "max_tokens": 1, **fields}).encode()
