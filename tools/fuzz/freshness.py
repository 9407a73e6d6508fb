"""The fields of any server's response: how long it may be used again, never longer than anybody allows.

The input is lines of `name: value`; a line without a colon parts the first response from the one that confirms it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from random import Random
from typing import Final

from semel.media.fetch.freshness import Freshness
from tools.fuzz.mutation import edited_text
from tools.fuzz.oracle import expect

_NOW: Final = 1_700_000_000.0
_YEAR_S: Final = 366 * 86_400
_FORBIDDEN: Final = re.compile(r"(?:^|,)\s*no-store\s*(?:,|$)", re.IGNORECASE)
_WORDS: Final = (
    *("cache-control: ", "max-age=", "no-store", "no-cache", "must-revalidate", "private", ", ", "=", '"', "\\", ";"),
    *("age: ", "date: ", "expires: ", "etag: ", "vary: ", "*", "last-modified: ", "\n", "0", "-1", "1" * 30, "²"),
    *("Tue, 14 Nov 2023 22:13:20 GMT", "Wednesday, 15-Nov-23 22:13:20 GMT", "Nov 14 22:13:20 2023", "+9999", "99999"),
)


def run(data: bytes) -> None:
    lines = data.decode("latin-1").split("\n")
    first, second = _fields(lines)
    fresh = Freshness.of(first, sent_at=_NOW - 1, received_at=_NOW)
    _check(fresh, first)
    confirmed = fresh.confirmed(second, sent_at=_NOW + 1, received_at=_NOW + 2)
    _check(confirmed, first | second)
    both = confirmed.limited_by(fresh)
    expect(not both.storable or (fresh.storable and confirmed.storable), "a redirect makes storable what was not")
    for now in (_NOW, _NOW + 2, _NOW + 60, _NOW + 86_400):
        expect(not both.is_fresh(now) or confirmed.is_fresh(now), "two responses live longer than one of them")
        expect(not both.is_fresh(now) or fresh.is_fresh(now), "two responses live longer than the older of them")


def _fields(lines: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    sections: tuple[dict[str, str], dict[str, str]] = ({}, {})
    section = 0
    for line in lines:
        name, colon, value = line.partition(":")
        section |= not colon
        sections[section][name.strip().lower()] = value.strip()
    return sections


def _check(fresh: Freshness, fields: Mapping[str, str]) -> None:
    expect(0 <= fresh.lifetime_s <= _YEAR_S and math.isfinite(fresh.age_s), f"{fresh!r} has no bounds")
    expect(fresh.age_s >= 0, f"{fresh!r} comes from the future")
    expect(not fresh.is_fresh(_NOW + 2 * _YEAR_S), f"{fresh!r} never ends")
    control = fields.get("cache-control", "")
    if '"' not in control and _FORBIDDEN.search(control):
        expect(not fresh.storable, f"{control!r} does not forbid to store")
    fresh.conditions()


def mutate(data: bytes, random: Random) -> bytes | None:
    """Write words of such fields into it."""
    return edited_text(data.decode("latin-1"), random, _WORDS).encode("latin-1", errors="replace")


def seeds() -> Mapping[str, bytes]:
    """Lifetimes, dates and validators, as servers send them."""
    date = b"date: Tue, 14 Nov 2023 22:13:10 GMT\n"
    return {
        "max-age": date + b'cache-control: public, max-age=60, ext="a, \\"b"\nage: 5',
        "expires": date + b"expires: Tue, 14 Nov 2023 23:13:20 GMT\nlast-modified: Mon, 13 Nov 2023 22:13:20 GMT",
        "no-store": b'cache-control: no-store, max-age=60\netag: "a"',
        "confirmed": b'cache-control: max-age=60\netag: W/"a"\n\ncache-control: no-cache\n' + date,
        "vary": b'vary: *\netag: "a"\nexpires: 0',
        "twice": b"cache-control: max-age=60, max-age=5",
    }
