"""The tokens of an image, from its header and the request's options: before a pixel is decoded (threats S29).

HF processors declare how many tokens an image of a size becomes. Where one does not, or cannot say, the image is
processed and its offer is checked.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from semel.core import Media
from semel.errors import PromptTooLong
from semel.media.decode.image import FORMATS

__all__ = ["check_header", "tokens_from_header"]


def check_header(processor: Any, media: Media, options: Mapping[str, object], max_tokens: int) -> None:
    """Refuse an image that alone has more tokens than the model takes, as its HF processor declares."""
    if media.modality != "image" or (tokens := tokens_from_header(processor, media.data, options)) is None:
        return
    if tokens >= max_tokens:
        raise PromptTooLong(
            f"the image alone has {tokens:,} tokens; the model takes {max_tokens:,} with the answer: send a smaller "
            "one, or lower min_pixels in mm_processor_kwargs"
        )


def tokens_from_header(processor: Any, data: bytes, options: Mapping[str, object]) -> int | None:
    """The tokens of an image, as it lies or turned; None if they cannot be told without its pixels."""
    from PIL import Image

    if (count := getattr(processor, "_get_num_multimodal_tokens", None)) is None:
        return None
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
        sizes = [(height, width), (width, height)]  # an EXIF orientation may turn it
        return min(map(int, count(image_sizes=sizes, **options)["num_image_tokens"]))
    except Exception:  # noqa: BLE001 - foreign code, given a client's file and options: processing tells what is wrong
        return None
