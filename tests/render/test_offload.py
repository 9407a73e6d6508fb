"""What is read at once, and what in a thread."""

from __future__ import annotations

import pytest

from semel.render.media.source import LongString
from semel.render.offload import is_cheap


def long(chars: int) -> LongString:
    return LongString(memoryview(b"A" * chars))


def chat(text: str = "what is this ?", *urls: str | LongString) -> object:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@pytest.mark.parametrize(
    ("messages", "light"),
    [
        (chat(), True),
        (chat("x" * 8_000), True),
        (chat("x" * 9_000), False),
        (chat("x", "data:image/png;base64," + "A" * 350_000), True),
        (chat("x", *["data:image/png;base64," + "A" * 350_000] * 3), False),
        (chat("x", long(350_000)), True),
        (chat("x", *[long(350_000)] * 3), False),
        (chat("x", *["data:,"] * 60), False),
        (None, True),
        ([{"role": "user", "content": 7}], True),
    ],
)
def test_a_chat_with_an_ordinary_image_is_light_and_a_large_one_is_not(messages: object, light: bool) -> None:
    assert is_cheap(messages) is light
