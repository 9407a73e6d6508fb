"""What every configuration of the matrix is asked besides the sixteen probes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np

from tests.engine.parity import Chat, audio_part, clip, draw_image, image_part, random_chat
from tools.engine.matrix import Asked

__all__ = ["CONTROLS", "MatrixRequest", "control", "random_requests"]

Part = dict[str, Any]

_POOL: Final = 16
_CLIPS: Final = 40
"""A clip has 66 embeddings on average, and the encoder cache has room for a long one: 750."""
_MAX_ITEMS: Final = 4
_PRIORITIES: Final = 4

CONTROLS: Final = {
    # Two new images of one size are encoded in one batch.
    "swapped": ((8, 8), 1_000),
    # The encoder's budget of the first step is too small for the last of these; the first two are of two sizes.
    "late": ((13, 12, 11, 10), 2_000),
}
"""The sides of images that show a planted fault, in units of 28 pixels, and a seed; by the fault's name."""


@dataclass(frozen=True)
class MatrixRequest:
    """A request, and whether it is aborted after its first token."""

    name: str
    chat: Chat
    is_aborted: bool = False
    priority: int = 0
    answers: int = 1
    """Of several, semel delivers the new items before the request."""


def random_requests(count: int, seed: int = 0, *, asks: Asked = "image") -> list[MatrixRequest]:
    """Requests over a pool of pictures or clips: duplicates in a request and between requests, text alone.

    One of eight is aborted, and of the others every fifth or so has two answers.
    """
    rng = np.random.default_rng(seed)
    pool = _clips() if asks == "audio" else _pictures(rng)

    def chat() -> Chat:
        count = int(rng.integers(0, _MAX_ITEMS + 1))
        return random_chat(rng, [pool[which] for which in rng.integers(0, len(pool), count)])

    return [
        MatrixRequest(
            f"random {number}",
            chat(),
            is_aborted=number % 8 == 3,
            priority=int(rng.integers(_PRIORITIES)),
            answers=2 if number % 6 == 4 and number % 8 != 3 else 1,
        )
        for number in range(count)
    ]


def control(name: str) -> MatrixRequest:
    """What shows a planted fault."""
    sides, seed = CONTROLS[name]
    parts = [image_part(_square(28 * side, seed + number)) for number, side in enumerate(sides)]
    return MatrixRequest(
        name, [{"role": "user", "content": [*parts, {"type": "text", "text": "what is in this picture?"}]}]
    )


def _pictures(rng: np.random.Generator) -> list[Part]:
    return [image_part(_square(28 * int(side), number)) for number, side in enumerate(rng.integers(4, 14, _POOL))]


def _clips() -> list[Part]:
    return [audio_part(clip(np.random.default_rng([3_000, number]))) for number in range(_CLIPS)]


@cache
def _square(side: int, seed: int) -> bytes:
    return draw_image(np.random.default_rng([seed, side]), side=side)
