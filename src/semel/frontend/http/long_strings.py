"""Cuts long strings of base64 out of a JSON text, so that parsing the rest takes as long as if they were not there.

A parser of JSON holds the interpreter's lock for 1.6 ms per megabyte, and the event loop waits, whatever thread it runs
in. A cut string is replaced by a token that a client cannot guess. Whether the cut was right shows after parsing: each
token must be the whole value of a field that takes media. So nothing here needs to know JSON. A stretch between two
quotes that is not a string leaves a token where JSON has none, and one that is only part of a string leaves a token
that is only part of a value. Then the whole text is parsed instead.

A cut string has only characters of base64, after the head of a data URL or none, so that it is valid JSON and ASCII.
After the head of a list of frames it may have commas too.
Of escapes it may have the one that some encoders write for each slash. Everything is done in pieces of at most 1 MiB:
between them, another thread can run.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from mmap import mmap
from typing import Final

import pybase64

from semel.media import FRAME_LIST
from semel.render.media.source import LongString

__all__ = ["MIN_CHARS", "Cut", "cut_long_strings"]

MIN_CHARS: Final = 65_536
"""Shorter strings stay."""

_PIECE: Final = 1 << 20  # a multiple of 4, as base64 is
_HEAD: Final = re.compile(rb"data:[ !#-+\--\[\]-~]{0,512},", re.IGNORECASE)
"""The head of a data URL up to its first comma: ASCII without control characters, quotes and backslashes."""

_OF_FRAMES: Final = (string.ascii_letters + string.digits + "+/=,").encode()
_OTHER_ESCAPE: Final = re.compile(rb"\\[^/]")


@dataclass(frozen=True, slots=True)
class Cut:
    """A JSON text without its long strings."""

    rest: bytearray
    strings: Mapping[str, LongString]
    """By the tokens in `rest` that stand for them."""


def cut_long_strings(body: bytes | bytearray, nonce: str) -> Cut:
    """Cut the long strings out. `nonce` makes the tokens unguessable: it is random and of letters and digits."""
    whole = memoryview(body)
    rest, strings, copied = bytearray(), dict[str, LongString](), 0
    for start, end in _stretches(body):
        if (found := _base64_in(body, whole, start, end)) is not None:
            token = f"{nonce}x{len(strings)}"
            strings[token] = found
            _append(rest, whole[copied:start])
            rest += token.encode()
            copied = end
    if strings:
        _append(rest, whole[copied:])
    return Cut(rest, strings)


def _stretches(body: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """The long stretches between a quote and the next. Looked for backwards, most quotes are passed over."""
    start = 0
    while start + MIN_CHARS < len(body):
        if (quote := body.rfind(b'"', start, start + MIN_CHARS)) >= 0:
            start = quote + 1
            continue
        if (end := _find(body, start + MIN_CHARS)) < 0:
            return
        if start:
            yield start, end
        start = end + 1


def _find(body: bytes | bytearray, start: int) -> int:
    """The next quote from `start` on, or -1."""
    pieces = range(start, len(body), _PIECE)
    return next((found for piece in pieces if (found := body.find(b'"', piece, piece + _PIECE)) >= 0), -1)


def _base64_in(body: bytes | bytearray, whole: memoryview, start: int, end: int) -> LongString | None:
    """The string between two quotes, if it is base64 after the head of a data URL or none."""
    data = whole[start:end]
    pieces = range(start, end, _PIECE)
    if any(body.find(b"\\", piece, min(piece + _PIECE, end)) >= 0 for piece in pieces):
        if (plain := _unescape(body, start, end)) is None:
            return None
        data = plain
    head = _HEAD.match(data)
    is_plain = _is_frames if head is not None and head[0].lower() == FRAME_LIST else _is_base64
    return LongString(data) if is_plain(data[head.end() if head else 0 :]) else None


def _unescape(body: bytes | bytearray, start: int, end: int) -> memoryview | None:
    r"""The characters of a string whose only escape is `\/`; None if it has others.

    They are written to pages that the system provides one by one: a buffer that grows is copied at once.
    """
    plain, size = mmap(-1, end - start), 0
    while start < end:
        stop = min(start + _PIECE, end)
        if stop < end and body[stop - 1] == ord("\\"):
            stop += 1  # an escape stays in one piece
        if _OTHER_ESCAPE.search(body, start, stop) or body[stop - 1] == ord("\\"):
            return None
        piece = body[start:stop].replace(b"\\", b"")  # in 1 ms; replacing two characters takes 6
        plain[size : size + len(piece)] = piece
        start, size = stop, size + len(piece)
    return memoryview(plain)[:size]


def _is_base64(data: memoryview) -> bool:
    """Return whether all characters are of base64: decoding 1 MiB takes 0.1 ms without the interpreter's lock."""
    try:
        for start in range(0, len(data), _PIECE):
            pybase64.b64decode(data[start : start + _PIECE], validate=True)
    except ValueError:
        return False
    return True


def _is_frames(data: memoryview) -> bool:
    """Return whether all characters are of base64, or commas; where they stand is seen when a frame is decoded."""
    piece = _PIECE >> 2  # this holds the interpreter's lock
    pieces = (data[start : start + piece] for start in range(0, len(data), piece))
    return not any(one.tobytes().translate(None, _OF_FRAMES) for one in pieces)


def _append(rest: bytearray, data: memoryview) -> None:
    for start in range(0, len(data), _PIECE):
        rest += data[start : start + _PIECE]
