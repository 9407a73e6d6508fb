"""The questions that both servers get: drawn images, clips and videos, alone and together. Pure: from a seed.

Every item is small, new to both servers and lossless. An image comes again with its planes swapped, and grey: the
answers to these tell what is wrong where the answers to the image itself differ.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pybase64
from PIL import Image

from semel.core import Media, Modality
from semel.media.decode.warmup_media import sample_clip, video_file

__all__ = ["GREY", "SWAPPED", "Question", "drawn_questions"]

_SIZES: Final = ((112, 112), (224, 168), (300, 900), (640, 480), (1024, 768))
_CLIPS_S: Final = (1.0, 0.6, 3.0)
_VIDEOS: Final = ((8, 112, 112), (5, 168, 112))
_TEXT: Final = "What is this?"
_ANSWER_TOKENS: Final = 8
_TOP: Final = 5
SWAPPED: Final = ", red and blue swapped"
GREY: Final = ", grey"


@dataclass(frozen=True, slots=True)
class Question:
    """One chat."""

    name: str
    parts: tuple[str, ...]
    """The names of the questions that have its items one by one, in their order; empty for less than two items."""

    modalities: tuple[Modality, ...]
    body: bytes
    is_control: bool = False
    """Whether it is asked only to tell what is wrong with another."""


@dataclass(frozen=True, slots=True)
class _Item:
    name: str
    modality: Modality
    part: dict[str, Any]


def drawn_questions(seed: int, modalities: Sequence[Modality] = ("image", "audio", "video")) -> list[Question]:
    """A text, and for each modality single items, two in both orders, three; at last one item of each modality."""
    rng = np.random.default_rng(seed)
    questions = [_question("a text", ())]
    firsts: list[_Item] = []
    for modality in modalities:
        items = _DRAW[modality](rng)
        firsts.append(items[0])
        questions += [_question(item.name, (item,)) for item in items]
        if modality == "image":
            questions += _controls(np.random.default_rng(seed), items[0])
        first, second, *_ = items
        questions += [_question(f"{modality} A, B", (first, second)), _question(f"{modality} B, A", (second, first))]
        questions.append(_question(f"{modality} A, B, A", (first, second, first)))
    if len(firsts) > 1:
        questions.append(_question(" and ".join(item.modality for item in firsts), firsts))
    return questions


def _question(name: str, items: Sequence[_Item], *, is_control: bool = False) -> Question:
    content = [*(item.part for item in items), {"type": "text", "text": _TEXT}]
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": _ANSWER_TOKENS,
        "temperature": 0.0,
        "seed": 0,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": _TOP,
        "return_token_ids": True,
    }
    parts = tuple(item.name for item in items) if len(items) > 1 else ()
    return Question(name, parts, tuple(item.modality for item in items), json.dumps(body).encode(), is_control)


def _images(rng: np.random.Generator) -> list[_Item]:
    return [_image(f"image {_letter(number)}", _pixels(rng, *size)) for number, size in enumerate(_SIZES)]


def _controls(rng: np.random.Generator, item: _Item) -> Iterator[Question]:
    """Yield the first image, drawn again, with its planes swapped, and grey."""
    pixels = _pixels(rng, *_SIZES[0])
    grey = np.repeat(pixels[:, :, :1], 3, axis=2)
    yield _question(item.name + SWAPPED, (_image(item.name, pixels[:, :, ::-1]),), is_control=True)
    yield _question(item.name + GREY, (_image(item.name, grey),), is_control=True)


def _pixels(rng: np.random.Generator, width: int, height: int) -> Any:
    """Coarse noise, so that a model that scales it down still sees it; red is bright and blue is dark."""
    coarse = rng.integers(0, 128, (height // 14 + 1, width // 14 + 1, 3), dtype=np.uint8)
    coarse[:, :, 0] += 127
    return coarse.repeat(14, axis=0).repeat(14, axis=1)[:height, :width]


def _image(name: str, pixels: Any) -> _Item:
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, "PNG")
    return _Item(name, "image", {"type": "image_url", "image_url": {"url": _url("image/png", buffer.getvalue())}})


def _clips(rng: np.random.Generator) -> list[_Item]:
    return [
        _media_item(f"audio {_letter(number)}", sample_clip(int(rng.integers(1, 400)), seconds=seconds))
        for number, seconds in enumerate(_CLIPS_S)
    ]


def _videos(rng: np.random.Generator) -> list[_Item]:
    del rng  # a codec's bytes differ by its version anyway
    return [_media_item(f"video {_letter(number)}", video_file(*shape)) for number, shape in enumerate(_VIDEOS)]


def _media_item(name: str, media: Media) -> _Item:
    kind = f"{media.modality}_url"
    return _Item(name, media.modality, {"type": kind, kind: {"url": _url(media.mime or "", media.data)}})


def _url(mime: str, data: bytes) -> str:
    return f"data:{mime};base64,{pybase64.b64encode(data).decode()}"


def _letter(number: int) -> str:
    return "ABCDEFGH"[number]


_DRAW: Final = {"image": _images, "audio": _clips, "video": _videos}
