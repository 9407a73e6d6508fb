"""Cuts the members that no API has out of a JSON object, so that nothing is kept of them and parsing takes no longer.

A parser builds an object for each key and each value, with the interpreter's lock: 60,000 keys take 30 ms of the event
loop, whatever thread it runs in. This one looks at keys only, steps over their values, and lets other threads run. What
is cut is valid JSON. A text that is no object, or cannot be read, is left as it is: the parser says what is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container
from typing import Final

import msgspec

__all__ = ["without_members"]

_PIECE: Final = 65_536
"""What is stepped over at once: 0.2 ms."""

_MAX_KEY_BYTES: Final = 1_024
"""A longer key is no field's, however its letters are escaped."""

_SPACE: Final = re.compile(rb"[ \t\n\r]*+")
_SCALAR: Final = re.compile(rb"[^ \t\n\r,{}\[\]\"]++")
_STRING: Final = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_INSIDE: Final = re.compile(rb'(?:[^"{}\[\]]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+', re.DOTALL)
"""Everything up to the next bracket, with the strings that end in the piece."""

_SHORT: Final = re.compile(
    rb'"([ !#-\[\]-~]{0,256}+)"[ \t\n\r]*+:[ \t\n\r]*+'
    rb'(?:-?(?:0|[1-9][0-9]{0,64}+)|true|false|null|"[ !#-\[\]-~]{0,256}+"),[ \t\n\r]*+(?!\})'
)
"""A member that is short and plain, and the comma before the next: looked at in a fourth of the time."""

_VALUE: Final = msgspec.json.Decoder(msgspec.Raw)
"""Checks a value, and keeps nothing of it."""

_QUOTE, _COLON, _COMMA = b'":,'
_OPENING, _CLOSING = frozenset(b"[{"), frozenset(b"]}")


class _UnreadableError(Exception):
    pass


def without_members(body: bytes | bytearray, known: Container[str], cut: Callable[[str], None]) -> bytes | bytearray:
    """The object without the members whose names are not `known`; `cut` gets each of these names as it is read.

    The same `body` if nothing is cut: then there are no such names, or it cannot be read.
    """
    try:
        return _cut(body, known, cut)
    except (_UnreadableError, IndexError, ValueError, RecursionError, msgspec.DecodeError):
        return body


def _cut(body: bytes | bytearray, known: Container[str], cut: Callable[[str], None]) -> bytes | bytearray:
    at = _skip_space(body, 0)
    if body[at : at + 1] != b"{":
        return body
    kept: list[memoryview] = []
    is_whole = True
    whole = memoryview(body)
    at = _skip_space(body, at + 1)
    while body[at] != ord("}"):
        short = _SHORT.match(body, at, at + _PIECE)
        if short is not None and (name := short[1].decode()) not in known:
            cut(name)
            is_whole, at = False, short.end()
            continue
        begin = at
        name, at = _key(body, at)
        value, at = at, _value_end(body, at)
        if name in known:
            kept.append(whole[begin:at])
        else:
            _VALUE.decode(whole[value:at])
            cut(name)
            is_whole = False
        at = _skip_space(body, at)
        if body[at] == _COMMA:
            at = _skip_space(body, at + 1)
            if body[at] == ord("}"):
                raise _UnreadableError
        elif body[at] != ord("}"):
            raise _UnreadableError
    if _skip_space(body, at + 1) != len(body):
        raise _UnreadableError
    return body if is_whole else _join(kept)


def _join(kept: list[memoryview]) -> bytearray:
    joined = bytearray(b"{")
    for member in kept:
        if len(joined) > 1:
            joined += b","
        for start in range(0, len(member), 1 << 20):
            joined += member[start : start + (1 << 20)]
    joined += b"}"
    return joined


def _key(body: bytes | bytearray, at: int) -> tuple[str, int]:
    """The key that begins here, and where its value begins."""
    end = _string_end(body, at)
    quoted = bytes(body[at : min(end, at + _MAX_KEY_BYTES)])
    if end - at > _MAX_KEY_BYTES:
        name = quoted[1:].decode(errors="replace")
    else:
        name = json.loads(quoted) if b"\\" in quoted else quoted[1:-1].decode()
    at = _skip_space(body, end)
    if body[at] != _COLON:
        raise _UnreadableError
    return name, _skip_space(body, at + 1)


def _value_end(body: bytes | bytearray, at: int) -> int:
    first = body[at]
    if first == _QUOTE:
        return _string_end(body, at)
    if first not in _OPENING:
        if (scalar := _SCALAR.match(body, at, at + _PIECE)) is None:
            raise _UnreadableError
        return scalar.end()
    depth, at = 1, at + 1
    while depth:
        at = _end_of(_INSIDE, body, at)
        if at >= len(body):
            raise _UnreadableError
        if body[at] == _QUOTE:
            at = _string_end(body, at)
        elif body[at] in _OPENING:
            depth, at = depth + 1, at + 1
        elif body[at] in _CLOSING:
            depth, at = depth - 1, at + 1
    return at


def _string_end(body: bytes | bytearray, at: int) -> int:
    """Where the string that begins here ends."""
    if body[at] != _QUOTE:
        raise _UnreadableError
    at += 1
    while True:
        end = _end_of(_STRING, body, at)
        if end >= len(body):
            raise _UnreadableError
        if body[end] == _QUOTE:
            return end + 1
        if end == at:  # nothing but an escape that is cut off
            raise _UnreadableError
        at = end


def _skip_space(body: bytes | bytearray, at: int) -> int:
    while (end := _end_of(_SPACE, body, at)) - at == _PIECE:
        at = end
    return end


def _end_of(pattern: re.Pattern[bytes], body: bytes | bytearray, at: int) -> int:
    found = pattern.match(body, at, at + _PIECE)
    assert found is not None  # each of these patterns takes nothing too
    return found.end()
