"""Damage to files: what bad disks, bad encoders and bad people do to them. Pure: the same numbers, the same damage."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Final

_LENGTHS: Final = (0, 1, 2, 3, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
_MAX_BYTES: Final = 64 << 10
_HEAD: Final = 256  # where most fields are that say how large everything is


def mutate(data: bytes, others: Sequence[bytes], rng: Random) -> bytes:
    """The file with one to four kinds of damage; `others` are valid files to take pieces from."""
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        data = rng.choice(_KINDS)(data, others, rng)[:_MAX_BYTES]
    return data


def _place(data: bytes, rng: Random) -> int:
    return rng.randrange(min(len(data), _HEAD) if rng.random() < 0.3 else len(data)) if data else 0


def _flip_bits(data: bytes, others: Sequence[bytes], rng: Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 32)) if data else 0):
        damaged[_place(data, rng)] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def _truncate(data: bytes, others: Sequence[bytes], rng: Random) -> bytes:
    return data[: _place(data, rng)]


def _splice(data: bytes, others: Sequence[bytes], rng: Random) -> bytes:
    """The beginning of the file and the end of another."""
    other = rng.choice(others)
    return data[: _place(data, rng)] + other[_place(other, rng) :]


def _set_length(data: bytes, others: Sequence[bytes], rng: Random) -> bytes:
    """A field that looks like a length, in either order of bytes, says something else."""
    form = rng.choice((">H", "<H", ">I", "<I"))
    size = struct.calcsize(form)
    place = _place(data, rng)
    old = int.from_bytes(data[place : place + size], "big" if form[0] == ">" else "little")
    new = rng.choice((*_LENGTHS, old + 1, old - 1, old * 2, old * 256, len(data))) % (1 << 8 * size)
    return data[:place] + struct.pack(form, new) + data[place + size :]


def _repeat(data: bytes, others: Sequence[bytes], rng: Random) -> bytes:
    """A piece of the file, once more or many times."""
    start, length = _place(data, rng), rng.choice((1, 4, 16, 64, 512, 4_096))
    return data[: start + length] + data[start : start + length] * rng.choice((1, 1, 8, 64)) + data[start + length :]


def _remove(data: bytes, others: Sequence[bytes], rng: Random) -> bytes:
    start = _place(data, rng)
    return data[:start] + data[start + rng.choice((1, 2, 4, 16, 128, 1_024)) :]


def _swap_heads(data: bytes, others: Sequence[bytes], rng: Random) -> bytes:
    """The body of the file behind the head of another."""
    size = rng.choice((4, 8, 12, 16, 32, 64))
    return rng.choice(others)[:size] + data[size:]


def _fill(data: bytes, others: Sequence[bytes], rng: Random) -> bytes:
    start, length = _place(data, rng), rng.choice((1, 4, 32, 256))
    return data[:start] + rng.choice((b"\x00", b"\xff", b"\x7f")) * length + data[start + length :]


_KINDS: Final[tuple[Callable[[bytes, Sequence[bytes], Random], bytes], ...]] = (
    *(_flip_bits, _flip_bits, _flip_bits, _flip_bits, _set_length, _set_length),
    *(_truncate, _splice, _repeat, _remove, _swap_heads, _fill),
)
