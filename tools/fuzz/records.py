"""Several byte strings in one input: each behind its length in two bytes. Any bytes can be split."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_LENGTH_BYTES: Final = 2


def split(data: bytes) -> list[bytes]:
    """The records of an input; the last one is what is left of it."""
    records = []
    position = 0
    while position < len(data):
        begin = position + _LENGTH_BYTES
        position = begin + int.from_bytes(data[position:begin], "little")
        records.append(data[begin:position])
    return records


def join(records: Iterable[bytes]) -> bytes:
    """The input with these records, none of which is over 64 KiB."""
    return b"".join(len(record).to_bytes(_LENGTH_BYTES, "little") + record for record in records)
