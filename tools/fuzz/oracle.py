"""What several targets hold semel against."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from semel.errors import SemelError

_MAX_MESSAGE_CHARS: Final = 1_000
_FOREIGN: Final = re.compile(r"0x[0-9a-fA-F]{6,}|<_io|object at|Errno|Error|Traceback|\.(?:py|c|so)\b")


class Finding(AssertionError):
    """An invariant does not hold for this input."""


def expect(holds: bool, otherwise: str) -> None:
    """State an invariant; unlike an assertion it is not optimised away."""
    if not holds:
        raise Finding(otherwise)


def check_message(error: SemelError) -> None:
    """An error's text is short and can be sent."""
    text = str(error)
    expect(len(text) <= _MAX_MESSAGE_CHARS, f"a message of {len(text):,} characters")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Finding(f"a message that cannot be sent: {text!r}") from None


def check_decoders_message(error: SemelError) -> None:
    """Nothing of what foreign code said is in a text that does not quote the client either (threats S7)."""
    check_message(error)
    expect(not _FOREIGN.search(str(error)), f"a message with foreign text: {str(error)!r}")


@contextmanager
def bounded(max_bytes: int) -> Iterator[None]:
    """Nothing in here may have allocated more at one time (threats S10)."""
    tracemalloc.start(1)
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    expect(peak <= max_bytes, f"{peak:,} bytes were allocated, {max_bytes:,} are the bound")
