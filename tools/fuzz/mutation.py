"""Edits that a fuzzer which flips bytes rarely makes: of trees, as JSON and msgpack give them, and long repetitions."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from random import Random
from typing import Any, Final

_NUMBERS: Final = (0, 1, -1, 2, 3, 127, 128, 255, 256, 65_535, 2**31 - 1, 2**31, 2**32, 2**62, 2**63, -(2**63))
_SCALARS: Final = (None, True, False, 0.5, 1e308, "", b"", *_NUMBERS)
_MAX_EDITS: Final = 4
_MAX_PIECE: Final = 8


def edited(tree: Any, random: Random, words: Sequence[Any]) -> Any:
    """The tree with a few random edits; `words` are values that mean something to who reads it."""
    root = [copy.deepcopy(tree)]
    for _ in range(random.randint(1, _MAX_EDITS)):
        places = [*_places(root)]
        holder, key = random.choice(places)
        other, its = random.choice(places)
        _edit(holder, key, other[its], random, words)
    return root[0] if root else None


def _places(holder: Any) -> list[tuple[Any, Any]]:
    """Every place of a value: what holds it, and under which key."""
    places: list[tuple[Any, Any]] = []
    pending = [holder]
    while pending:
        one = pending.pop()
        keys: list[Any] = list(one) if isinstance(one, dict) else list(range(len(one)))
        places += [(one, key) for key in keys]
        pending += [one[key] for key in keys if isinstance(one[key], dict | list)]
    return places


def _edit(holder: Any, key: Any, other: Any, random: Random, words: Sequence[Any]) -> None:
    value = holder[key]
    match random.randrange(7):
        case 0:
            holder[key] = copy.deepcopy(random.choice(words))
        case 1:
            holder[key] = random.choice(_SCALARS)
        case 2:
            holder[key] = copy.deepcopy(other)
        case 3:
            holder[key] = [value] if random.random() < 0.5 else {str(random.choice(words)): value}
        case 4 if isinstance(holder, dict):
            holder[str(random.choice(words))] = holder.pop(key)
        case 4 | 5 if isinstance(holder, list) and len(holder) > 1:
            holder.pop(key)
        case 6 if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(random.choice((value, random.choice(words)))))
        case _:
            holder[key] = _varied(value, random, words)


def _varied(value: Any, random: Random, words: Sequence[Any]) -> Any:
    match value:
        case bool() | None:
            return not value
        case int():
            return value + random.choice((-1, 1, value, -2 * value))
        case str():
            return edited_text(value, random, [word for word in words if isinstance(word, str)])
        case bytes():
            at = random.randint(0, len(value))
            return value[:at] + random.randbytes(random.randint(0, 4)) + value[at + random.randint(0, 4) :]
        case list() | dict():
            return type(value)()
    return value


def edited_text(text: str, random: Random, words: Sequence[str]) -> str:
    """The text with a word, or a part of one, written into it."""
    word = random.choice(words) if words else "\0"
    begin = random.randint(0, len(word))
    piece = word if random.random() < 0.5 else word[begin:] if random.random() < 0.5 else word[:begin]
    at = random.randint(0, len(text))
    return text[:at] + piece + text[at + random.choice((0, 0, 1, len(piece))) :]


def edited_records(records: Sequence[bytes], random: Random) -> list[bytes]:
    """The records in another order, one of them twice, or one fewer."""
    new = list(records)
    if not new:
        return new
    at, to = random.randrange(len(new)), random.randrange(len(new))
    match random.randrange(3):
        case 0:
            new[at], new[to] = new[to], new[at]
        case 1:
            new.insert(to, new[at])
        case _:
            new.pop(at)
    return new


def stretched(data: bytes, random: Random, max_bytes: int) -> bytes:
    """The input with a short piece of it many times in its place: what takes time for each pair of them shows it."""
    at = random.randint(0, max(0, len(data) - 1))
    piece = data[at : at + random.randint(1, _MAX_PIECE)] or b" "
    room = max_bytes - len(data)
    if room < len(piece):
        return data[:max_bytes]
    count = room // len(piece) if random.random() < 0.5 else random.randint(1, room // len(piece))
    return data[:at] + piece * count + data[at:]
