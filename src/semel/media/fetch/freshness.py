"""Freshness of a response: HTTP's rules for a private cache (RFC 9111). Pure.

Only the origin's statements count: a response without a lifetime is revalidated on every use, and nothing is ever
served stale. Each response is cached for one tenant, so `private` does not prevent it and `s-maxage` does not apply.
Times are seconds since 1970. A response with an unreasonably long field is not cached, and parsing a field takes at
most linear time: the server that sets the fields may be hostile (threats S24).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from typing import Final, Self

__all__ = ["HEADERS", "Freshness"]

HEADERS: Final = ("age", "cache-control", "date", "etag", "expires", "last-modified", "vary")
"""The response fields that decide about reuse."""

_MAX_LIFETIME_S: Final = 365 * 86_400
_MAX_FIELD_CHARS: Final = 1_024
# Possessive: a run of blanks is read once, not split in every way between two quantifiers.
_DIRECTIVE: Final = re.compile(r"""\s*+([^\s=,;"]++)(?:\s*+=\s*+(?:"((?:[^"\\]|\\.)*+)"|([^\s,"]*+)))?+\s*+(?:,|$)""")


@dataclass(frozen=True, slots=True)
class Freshness:
    """The reuse that a response allows, and the time when it was received."""

    received_at: float
    """Time of arrival."""

    age_s: float
    """Age on arrival: it may have waited in caches on its way."""

    lifetime_s: float
    """From its creation; 0 if it must be revalidated on every use."""

    storable: bool
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The fields that decided this."""

    shareable: bool = False
    """True if caches that several servers share may hold it: it is storable, and not `private`."""

    @classmethod
    def of(cls, headers: Mapping[str, str], *, sent_at: float, received_at: float) -> Self:
        """Parse the fields. Names are in lower case; values of repeated fields are joined by commas."""
        if any(len(headers.get(name, "")) > _MAX_FIELD_CHARS for name in HEADERS):
            return cls(received_at, age_s=0, lifetime_s=0, storable=False)
        directives = dict(_directives(headers.get("cache-control", "")))
        made_at = _seconds_of(headers.get("date"))
        apparent_age_s = 0.0 if made_at is None else max(0.0, received_at - made_at)
        told_age_s = _number(headers.get("age", "0")) or 0
        lifetime_s = _lifetime_s(headers, directives, received_at if made_at is None else made_at)
        is_worth_it = bool(lifetime_s or headers.get("etag") or headers.get("last-modified"))
        storable = is_worth_it and "no-store" not in directives and "*" not in headers.get("vary", "")
        return cls(
            received_at,
            max(apparent_age_s, told_age_s + max(0.0, received_at - sent_at)),
            lifetime_s,
            storable,
            {name: headers[name] for name in HEADERS if name in headers},
            storable and "private" not in directives,
        )

    def is_fresh(self, now: float) -> bool:
        """Return whether it may be used without revalidation. A clock that was set back makes nothing fresh."""
        held_s = now - self.received_at
        return self.storable and held_s >= 0 and self.age_s + held_s < self.lifetime_s

    def conditions(self) -> dict[str, str]:
        """Return the fields of a request that revalidates this response."""
        fields = {"If-None-Match": self.headers.get("etag"), "If-Modified-Since": self.headers.get("last-modified")}
        return {name: value for name, value in fields.items() if value}

    def confirmed(self, headers: Mapping[str, str], *, sent_at: float, received_at: float) -> Freshness:
        """Return the freshness after a 304 with these fields: fields that the 304 omits stay."""
        kept = {name: value for name, value in self.headers.items() if name not in ("age", "date")}
        return Freshness.of({**kept, **headers}, sent_at=sent_at, received_at=received_at)

    def limited_by(self, other: Freshness) -> Freshness:
        """The freshness of two responses used as one, such as a redirect and its target: while both are fresh."""
        since_s = self.received_at - other.received_at
        left_s = min(self.lifetime_s - self.age_s, other.lifetime_s - other.age_s - since_s)
        return replace(
            self,
            lifetime_s=max(0.0, self.age_s + left_s),
            storable=self.storable and other.storable,
            shareable=self.shareable and other.shareable,
        )


def _lifetime_s(headers: Mapping[str, str], directives: Mapping[str, str], made_at: float) -> float:
    if "no-cache" in directives:
        return 0
    if "max-age" in directives:
        return min(_number(directives["max-age"]) or 0, _MAX_LIFETIME_S)
    if "expires" not in headers:
        return 0
    ends_at = _seconds_of(headers["expires"])
    return 0 if ends_at is None else min(max(0.0, ends_at - made_at), _MAX_LIFETIME_S)


def _directives(text: str) -> Iterator[tuple[str, str]]:
    """Yield each directive and its value. The text must parse to its end; otherwise it counts as a prohibition."""
    found: dict[str, str] = {}
    position = 0
    while position < len(text) and (match := _DIRECTIVE.match(text, position)) is not None:
        name = match[1].lower()
        value = match[2] if match[2] is not None else match[3] or ""
        # Two lifetimes contradict each other: the shorter one is safe.
        if name == "max-age" and name in found:
            value = str(min(_number(found[name]) or 0, _number(value) or 0))
        found[name] = value
        position = match.end()
    if position < len(text):
        found = {"no-store": ""}  # unreadable text may have been a prohibition
    yield from found.items()


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text[:12]) if text.isascii() and text.isdigit() else None


def _seconds_of(date: str | None) -> float | None:
    if date is None:
        return None
    try:
        return parsedate_to_datetime(date).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
